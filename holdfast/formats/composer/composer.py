"""MosaicML Composer: one file of rank 0, archives of every rank with DeepSpeed's files in them, or shards of DCP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats.assemble import ForeignState
from holdfast.formats.composer.paths import Save, is_template, matching, saves_in, siblings
from holdfast.formats.dcp import dcp
from holdfast.formats.deepspeed.ranks import is_rank_file, read_ranks
from holdfast.formats.fqns import model_state, optimizer_state
from holdfast.formats.machine import scratch, tars
from holdfast.formats.machine.pickles import Record
from holdfast.formats.machine.torch_files import is_torch_file, load_file
from holdfast.formats.machine.zips import Archive, is_zip
from holdfast.formats.sources import Stretch, all_of, file
from holdfast.storage.naming import naming
from holdfast.storage.place import Place

_STATES = "composer_states.pt"
_DEEPSPEED = "deepspeed/"
_PACKED_TAR = re.compile(r"\.(?:tar\.\w+|tgz|tbz2?|txz)$")
_OWN_TAR = re.compile(r"(?:rank|ba)\d+.*\.tar$")
_BESIDE = frozenset(["latest", "zero_to_fp32.py", "zero_to_torch.py"])
"""Other files in Composer's archives: DeepSpeed leaves them there."""

_KEYS = frozenset(["rank_zero_seed", "timestamp", "timer", "integrations", "schedulers", "callbacks"])
"""Every file of Composer's that has more than weights has one of these."""

_MARKS = (b"state.rank_zero_seed", b"state.timestamp", b"composer_env_info", b"state.integrations")
_SECTIONS = frozenset(["model", "module", "optimizer", "rng"])

Members = dict[str, Stretch]


def read(path: Place) -> ForeignState | None:
    """The checkpoint of Composer at ``path``: a rank's file or archive, a template with ``{rank}``, or a folder."""
    if is_template(path) and not path.exists():
        return _newest(path, matching(path))
    if path.name == ".metadata" or path.suffix == ".distcp":
        return _shards(path.parent)
    if path.is_dir():
        return _shards(path) or _newest(path, saves_in(path))
    members = _members(path) if path.is_file() else None
    return None if members is None else _read(path, members, "")


def _newest(path: Place, saves: list[Save]) -> ForeignState | None:
    """The newest of several saves that is one of Composer's."""
    count = len({save.files[0].real() for save in saves})
    for save in saves:
        first = save.files[0]
        reading = first.name if count == 1 else f"{first.name}, the newest of {count} saves"
        if first.is_symlink():
            reading += f" (a link to {first.real().name})"
        if first.is_dir():
            content = _shards(first, reading)
        else:
            members = _members(first)
            content = None if members is None else _read(first, members, reading, save)
        if content is not None:
            return content
    return None


def _members(path: Place) -> Members | None:
    """The files of Composer's in an archive by name; a file that is no archive counts as one of its states."""
    whole = all_of(file(path))
    if is_zip(whole):
        return {_STATES: whole} if _begins_as_states(whole) else None
    if tars.is_tar(whole.read(0, min(tars.BLOCK, whole.nbytes))):
        first = next(tars.entries(tars.PlainStream(whole), path), None)
        return _wanted(tars.members(whole)) if first is not None and _is_known(first.name) else None
    if _OWN_TAR.search(path.name) and not is_torch_file(whole):
        raise Damaged(f"{path} is no tar archive: it was altered, or is misnamed")
    name = scratch.first_member(path)
    if name == "" and _PACKED_TAR.search(path.name):
        raise Damaged(f"{path} unpacks to something that is no tar archive: it was altered, or is misnamed")
    if name is None or not (_is_known(name) or (name == "" and ".pt." in path.name)):
        return None
    unpacked = scratch.unpacked(path, _is_wanted)
    if "" in unpacked:
        return {_STATES: unpacked[""]} if is_zip(unpacked[""]) and _begins_as_states(unpacked[""]) else None
    return _wanted(unpacked)


def _is_known(name: str) -> bool:
    return _is_wanted(name) or name in _BESIDE or name.startswith(_DEEPSPEED)


def _is_wanted(name: str) -> bool:
    return name in ("", _STATES) or is_rank_file(name.removeprefix(_DEEPSPEED))


def _wanted(members: Members) -> Members | None:
    return {name: stretch for name, stretch in members.items() if _is_wanted(name)} or None


def _begins_as_states(data: Stretch) -> bool:
    """Whether the first key in a file of torch.save is `state`. This spares reading the pickles of other files."""
    archive = Archive(data)
    name = next((name for name in archive.names if name.endswith("data.pkl")), None)
    if name is None:
        return False
    start = archive.member(name)
    return b"state" in start.read(0, min(64, start.nbytes))


def _read(path: Place, members: Members, reading: str, save: Save | None = None) -> ForeignState | None:
    """The save that a file with ``members`` belongs to. None if it only looked like one of Composer's."""
    ranks = {path: members}
    if any(name != _STATES for name in members):
        # The files of one save are together where links lead to; the links themselves may be renewed one by one.
        beside = siblings(path.real())
        if save is not None and len(save.files) > len(beside.files):  # a folder for each rank
            beside = save
        ranks = {file: _members(file) or {} for file in beside.files}
    holders = [file for file, states in ranks.items() if _STATES in states]
    if len(holders) != 1:
        names = ", ".join(file.name for file in ranks)
        raise (NotACheckpoint if not holders else Damaged)(
            f"{path}: of the archives of all ranks ({names}) one should hold {_STATES}, the first rank's; "
            f"{len(holders) or 'none'} of them does. Bring it back, or open it as a template with {{rank}}"
        )
    tree = load_file(ranks[holders[0]][_STATES])
    if not _is_states(tree):
        return None
    states = _checkpoint_of(tree, holders[0], reading)
    files: dict[str, Stretch] = {}
    for archive, inside in ranks.items():
        for name, stretch in inside.items():
            if name == _STATES:
                continue
            if name in files:
                raise Damaged(
                    f"{archive} holds {name}, which {files[name].source.path} has too: one is of another save"
                )
            files[name] = stretch
    if not files:
        return states
    below = _ranks({name.removeprefix(_DEEPSPEED): stretch for name, stretch in files.items()}, path, list(ranks))
    clashing = below.state.keys() & states.state.keys()
    own = {key: value for key, value in below.state.items() if key not in clashing}
    more = {"deepspeed": {key: below.state[key] for key in clashing}} if clashing else {}
    return ForeignState(
        "Composer with DeepSpeed", {**own, **states.state, **more},
        below.step if states.step is None else states.step, below.world_size,
        {**states.producer, **below.producer}, reading,
    )  # fmt: skip


def _ranks(files: Members, path: Place, archives: list[Place]) -> ForeignState:
    try:
        return read_ranks(files, path)
    except Damaged as error:
        names = ", ".join(archive.name for archive in archives)
        raise Damaged(
            f"{error}. These archives were read: {names}; if those of other ranks lie elsewhere, open the template "
            "that leads to all of them, with {rank} in it"
        ) from error


def _shards(folder: Place, reading: str = "") -> ForeignState | None:
    """A sharded save: a folder of DCP whose keys are Composer's."""
    metadata = folder / ".metadata"
    if not metadata.is_file():
        return None
    with naming(metadata, "read"):
        data = metadata.read_bytes()
    if b"state.model." not in data or not any(mark in data for mark in _MARKS):
        return None
    shards = dcp.read_folder(folder)
    return replace(_checkpoint_of(shards.tree, folder, reading), world_size=shards.world_size)


def _is_states(tree: Any) -> bool:
    if not isinstance(tree, dict) or not tree.keys() <= {"state", "rng"} or not isinstance(tree.get("state"), dict):
        return False
    state = tree["state"]
    return bool(_KEYS & state.keys()) or (
        isinstance(state.get("model"), dict) and state.keys() <= {"model", "metadata"}
    )


def _checkpoint_of(tree: Mapping[str, Any], where: Place, reading: str) -> ForeignState:
    """Composer's own tree as ours: model and optimizer under our names, the rest of `state` and `rng` beside them."""
    held = dict(tree["state"])
    state: dict[str, Any] = {}
    if "model" in held:
        state["model"] = model_state(_whole(held.pop("model"), where))
    optimizers = held.pop("optimizers", None)
    if isinstance(optimizers, Mapping):
        named = {name: optimizer_state(saved, where) for name, saved in optimizers.items()}
        state.update({"optimizer": next(iter(named.values()))} if len(named) == 1 else {"optimizers": named})
    clashing = {key: held.pop(key) for key in _SECTIONS & held.keys()}
    state.update(held)
    if clashing:
        state["state"] = clashing
    rng = tree.get("rng")
    if rng is not None:
        state["rng"] = rng
    world_size = max(len(rng), 1) if isinstance(rng, list) else 1
    return ForeignState("Composer", state, _step(held, where), world_size, _producer(held), reading)


def _whole(model: Any, where: Place) -> Mapping[str, Any]:
    if not isinstance(model, Mapping):
        raise Damaged(f"{where}: its model is no state dict")
    for name, value in model.items():
        if isinstance(value, Record) and value.name.rpartition(".")[2] in ("ShardedTensor", "DTensor"):
            raise Unsupported(
                f"{where}: {name} is a {value.name}: each rank saved its own shards in a file of its own, as Composer "
                "did with torch 1.13. Load it with those, and save it with state_dict_type='full'"
            )
    return model


def _step(held: Mapping[str, Any], where: Place) -> int | None:
    """The batch in the timestamp (formerly timer), at its top or one level deeper; else that in the file's name."""
    for key in ("timestamp", "timer"):
        timestamp = held.get(key)
        for node in (timestamp, *(timestamp.values() if isinstance(timestamp, Mapping) else ())):
            batch = node.get("batch") if isinstance(node, Mapping) else None
            if type(batch) is int:
                return batch
    named = re.search(r"ep\d+-ba(\d{1,15})(?!\d)", where.real().name)
    return int(named[1]) if named else None


def _producer(held: Mapping[str, Any]) -> dict[str, str]:
    metadata = held.get("metadata")
    info = metadata.get("composer_env_info") if isinstance(metadata, Mapping) else None
    version = info.get("composer_version") if isinstance(info, Mapping) else None
    return {"composer": version} if isinstance(version, str) else {}
