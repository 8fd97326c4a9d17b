"""torchsnapshot: a folder with ``.snapshot_metadata``, which says of every leaf of every rank where its bytes lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats import members
from holdfast.formats.assemble import ForeignState
from holdfast.formats.dcp.names import own_items, step_in
from holdfast.formats.machine.untrusted import damaged_as, read_whole
from holdfast.formats.members import newest
from holdfast.formats.sharded import join_nodes
from holdfast.formats.shares import MAX_RANKS
from holdfast.formats.simplified import MAX_DEPTH, PerRank
from holdfast.formats.torchsnapshot.entries import Entry, Leaves, is_everywhere, is_sharded, without_owner
from holdfast.storage.place import Place

METADATA = ".snapshot_metadata"
MAX_METADATA = 4 << 30
"""Bytes; a manifest has about 500 for a tensor of a rank."""

_PAYLOADS = frozenset(["batched", "replicated", "sharded", "replicated_sharded"])

Entries = dict[str, dict[int, Entry]]
"""What each rank said of a path, by path and rank."""


def read(path: Place) -> ForeignState | None:
    """The snapshot at ``path`` (its folder, its ``.snapshot_metadata``, or a run's folder), or None if there is none.

    Raises NotACheckpoint for a snapshot that was never committed, Damaged for one that is not whole.
    """
    folder, reading = _folder(path)
    if folder is None:
        return None
    version, world_size, entries = _entries(folder / METADATA)
    state, how = own_items(_Tree(folder, world_size, entries).items(), folder)
    reading = "; ".join(filter(None, [reading, *how]))
    return ForeignState("torchsnapshot", state, step_in(state), world_size, {"torchsnapshot": version}, reading)


def _folder(path: Place) -> tuple[Place | None, str]:
    if path.name == METADATA and path.is_file():
        return path.parent, ""
    if not path.is_dir():
        return None, ""
    if (path / METADATA).is_file():
        return path, ""
    names = set(members.names(path))
    if names & _PAYLOADS and all(name.isdecimal() for name in names - _PAYLOADS):
        raise NotACheckpoint(
            f"{path} holds files of torchsnapshot but no {METADATA}, which is written last: that snapshot was never "
            "finished. Take another one"
        )
    return newest(path, lambda folder: (folder / METADATA).is_file()) or (None, "")


def _entries(path: Place) -> tuple[str, int, Entries]:
    """Version, world size and the manifest of a snapshot, by path and rank."""
    data = read_whole(path, MAX_METADATA)
    if re.search(rb"^version: *['\"]?0\.0\.", data, re.MULTILINE):
        raise Unsupported(
            f"{path} is the YAML manifest of a torchsnapshot before 0.1.0, which holdfast does not read: restore the "
            "snapshot with torchsnapshot 0.1.0 and take it again"
        )
    with damaged_as(f"{path} is no manifest of torchsnapshot: it was truncated or altered"):
        content = msgspec.json.decode(data)
        version, world_size, manifest = str(content["version"]), content["world_size"], content["manifest"]
        if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"a world size of {world_size}")
        entries: Entries = {}
        for key, entry in manifest.items():
            rank, _, name = key.partition("/")
            if not rank.isdecimal() or not int(rank) < world_size or not name:
                raise ValueError(f"{key[:200]!r} names no rank of {world_size}")
            if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                raise ValueError(f"{key[:200]!r} has no type")
            keys = entry.get("keys", [])
            if not isinstance(keys, list) or not all(isinstance(k, (str, int)) for k in keys):
                raise ValueError(f"{key[:200]!r} has keys that are none")
            entries.setdefault(name, {})[int(rank)] = entry
    return version, world_size, entries


class _Place(NamedTuple):
    """Where in the tree the leaf of that path belongs."""

    path: str


class _Tree:
    """The tree that the entries of all ranks make up, and the leaves in it."""

    def __init__(self, folder: Place, world_size: int, entries: Entries) -> None:
        self.where, self.world_size, self.entries = folder / METADATA, world_size, entries
        self.leaves = Leaves(folder)
        self.held: dict[str, list[tuple[int, Any]]] = {}
        self.visited: set[str] = set()

    def items(self) -> dict[str, Any]:
        """What was saved, by the keys of the application: the leaves of all ranks joined."""
        tops = [path for path in self.entries if not self.is_below(path)]
        trees = {unquote(path): self.node(path, 0) for path in tops}
        lost = self.entries.keys() - self.visited
        if lost:
            raise Damaged(f"{self.where}: {len(lost)} entries are in no container, such as {min(lost)}: it was altered")
        if len(trees) < len(tops):
            raise Damaged(f"{self.where}: two of {sorted(tops)} are one name")
        self.prove_ranks()
        answers = join_nodes(self.held, self.world_size, f"{self.leaves.folder}: ")
        return {name: _filled(tree, answers) for name, tree in trees.items()}

    def is_below(self, path: str) -> bool:
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in self.entries:
                return True
        return False

    def prove_ranks(self) -> None:
        """A rank without entries may have had shards: without them the whole would seem smaller than it is."""
        ranks = {rank for by_rank in self.entries.values() for rank in by_rank}
        if len(ranks) < self.world_size and any(is_sharded(e) for by in self.entries.values() for e in by.values()):
            raise Damaged(f"{self.where} has no entries of ranks {sorted({*range(self.world_size)} - ranks)[:10]}")

    def node(self, path: str, depth: int) -> Any:
        """The node at a path, its leaves still to be joined (`_Place`)."""
        self.visited.add(path)
        if depth > MAX_DEPTH:
            raise Damaged(f"{self.where}: {path[:200]} is nested {MAX_DEPTH} deep")
        kinds = {_container(entry) for entry in self.entries[path].values()}
        if len(kinds) > 1:
            raise Unsupported(f"{self.where}: {path} is a container on some ranks, and something else on others")
        (kind,) = kinds
        if kind is dict:
            return {key: self.node(child, depth + 1) for key, child in self.children(path).items()}
        if kind is list:
            return self.list(path, depth)
        self.held[path] = self.leaf(path)
        return _Place(path)

    def leaf(self, path: str) -> list[tuple[int, Any]]:
        """What the ranks hold at a path."""
        by_rank = self.entries[path]
        if any(is_sharded(entry) for entry in by_rank.values()):
            missing = without_owner(by_rank)
            if missing is not None:
                raise Damaged(f"{self.where}: {path} lacks the shard of rank {missing}")
            return [(0, self.leaves.sharded(path, list(by_rank.values())))]
        everywhere = [(rank, entry) for rank, entry in by_rank.items() if is_everywhere(entry)]
        return [(rank, self.leaves.value(path, entry)) for rank, entry in everywhere[:1] or by_rank.items()]

    def children(self, path: str) -> dict[Any, str]:
        """Where each key of a dict lies: those of all ranks, in order. Raises Damaged for a key without an entry."""
        children: dict[Any, str] = {}
        for rank, entry in self.entries[path].items():
            for key in entry.get("keys", ()):
                child = children.get(key) or self.child(path, key)
                if not self.has(child, rank):
                    raise Damaged(
                        f"{self.where}: rank {rank} says that {path} holds {str(key)[:200]!r}, but there is no entry "
                        "of it: the manifest was altered"
                    )
                children[key] = child
        return children

    def child(self, path: str, key: Any) -> str:
        return f"{path}/{str(key).replace('%', '%25').replace('/', '%2F')}"

    def has(self, path: str, rank: int) -> bool:
        """Whether a rank had this node; a node that all ranks share has an entry of one."""
        by_rank = self.entries.get(path, {})
        return rank in by_rank or any(is_everywhere(entry) for entry in by_rank.values())

    def length(self, path: str) -> int:
        return next(i for i in count() if f"{path}/{i}" not in self.entries)

    def list(self, path: str, depth: int) -> Any:
        indices = range(self.length(path))
        if all(self.has(f"{path}/{i}", rank) for i in indices for rank in self.entries[path]):
            return [self.node(f"{path}/{i}", depth + 1) for i in indices]
        # Of other length on other ranks: not one list, but one for each.
        return PerRank(tuple(self.of_rank(path, rank, depth) for rank in range(self.world_size)))

    def of_rank(self, path: str, rank: int, depth: int) -> Any:
        """A node as one rank had it; None if it had none."""
        self.visited.add(path)
        if depth > MAX_DEPTH:
            raise Damaged(f"{self.where}: {path[:200]} is nested {MAX_DEPTH} deep")
        if not self.has(path, rank):
            return None
        by_rank = self.entries[path]
        entry = by_rank.get(rank) or next(entry for entry in by_rank.values() if is_everywhere(entry))
        if _container(entry) is dict:
            keys = entry.get("keys", ())
            return {key: self.of_rank(self.child(path, key), rank, depth + 1) for key in keys}
        if _container(entry) is list:
            inner = [self.of_rank(f"{path}/{i}", rank, depth + 1) for i in range(self.length(path))]
            return [value for i, value in enumerate(inner) if self.has(f"{path}/{i}", rank)]
        if is_sharded(entry):
            raise Unsupported(f"{self.where}: {path} is sharded, but in a list that is longer on some ranks")
        return self.leaves.value(path, entry)


def _container(entry: Entry) -> type | None:
    return {"dict": dict, "OrderedDict": dict, "list": list}.get(entry["type"])


def _filled(node: Any, answers: Mapping[str, Any]) -> Any:
    if isinstance(node, _Place):
        return answers[node.path]
    if isinstance(node, dict):
        return {key: _filled(value, answers) for key, value in node.items()}
    return [_filled(value, answers) for value in node] if isinstance(node, list) else node
