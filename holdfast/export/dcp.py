"""The format of torch.distributed.checkpoint: files of small torch archives, and `.metadata`, which says where each is.

Large tensors are cut into rows, since torch's reader reads a whole chunk for any part of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.export import pickles, zip_file
from holdfast.export.draft import Draft, Fixed, Span, packed, slabs
from holdfast.export.pickles import Call, Global, Instance, Pairs
from holdfast.export.selection import Leaf, Selection, check_values, nested
from holdfast.export.torch_file import add_small, archive
from holdfast.export.zip_file import Ending, Member
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, whole
from holdfast.ondisk.containers import is_sequence, mapped

CHUNK = 16 << 20
"""A chunk of a tensor is at most this many bytes, or one row of its last axis."""

METADATA = ".metadata"
_VERSION = "1.0.0"
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
Path = tuple[str | int, ...]


class _Chunk(NamedTuple):
    """One archive in a file: it begins at ``begin``, its one tensor is ``member``, and ``end`` is where it ends."""

    span: Span
    begin: int
    member: Member
    end: int

    def rest(self, total: int) -> bytes:
        """What follows the tensor's bytes."""
        ending = Ending(self.member.end, [(self.member, total)])
        add_small(ending, _only_tensor(self.span.leaf.dtype, self.span.box.lengths, self.span.nbytes))
        return zip_file.after(self.member, total) + ending.close()


@lru_cache(maxsize=256)  # thousands of tensors share a handful of shapes
def _only_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    return pickles.dumps(pickles.tensor(dtype, shape, nbytes, "0"))


def draft(checkpoint: Checkpoint, selection: Selection, *, max_file_bytes: int) -> Draft:
    """Files of chunks, each with about ``max_file_bytes`` of tensors, one of all values, and the metadata.

    A value that differs by rank becomes the list of the values of all ranks. Raises Mismatch if two leaves get the
    same name once their keys are joined by points, as this format does it.
    """
    check_values(selection, pickles.dumps)
    chunks: list[_Chunk] = []
    files: dict[str, int] = {}
    groups = packed(selection.tensors.values(), max_file_bytes)
    for number, group in enumerate(groups):
        path, at = f"__0_{number}.distcp", 0
        for leaf in group:
            for box in slabs(leaf.shape, max(CHUNK // leaf.itemsize, 1)):
                chunks.append(_placed(leaf, box, path, at))
                at = chunks[-1].end
        files[path] = at
    flat = _flattened(nested(selection, lambda path, rank: None))
    if len({_fqn(path) for path in flat}) < len(flat):
        joined = [_fqn(path) for path in flat]
        twice = next(name for name in joined if joined.count(name) > 1)
        raise Mismatch(f"two leaves are both called {twice!r} in this format; rename= or only= tells them apart")

    def finish(sums: Sequence[str]) -> Iterator[Fixed]:
        for chunk, total in zip(chunks, sums, strict=True):
            yield Fixed(chunk.span.path, chunk.begin, zip_file.before(chunk.member))
            yield Fixed(chunk.span.path, chunk.begin + chunk.member.data + chunk.member.nbytes, chunk.rest(int(total)))
        table = Table(f"__0_{len(groups)}.distcp")
        placed: dict[str, list[_Chunk]] = {}
        for chunk in chunks:
            placed.setdefault(chunk.span.leaf.name, []).append(chunk)
        for path, leaf in _flattened(nested(selection, checkpoint.per_rank)).items():
            if isinstance(leaf, Leaf):
                table.add_chunks(path, leaf, placed[leaf.name])
            else:
                yield from table.add(path, leaf)
        yield Fixed(METADATA, 0, table.metadata())

    return Draft(files, [chunk.span for chunk in chunks], "crc32", finish)


def left_out(selection: Selection) -> list[str]:
    """Empty dicts: this format has a name for leaves alone."""
    used = {name.rpartition("/")[0] for name in (*selection.origin, *selection.containers)}
    return [path for path, note in selection.containers.items() if not is_sequence(note) and path not in used]


def _placed(leaf: Leaf, box: Box, path: str, at: int) -> _Chunk:
    nbytes = box.size * leaf.itemsize
    align = zip_file.alignment(nbytes)
    begin = -(-at // align) * align
    member = zip_file.member("data/0", 0, nbytes, align)
    chunk = _Chunk(Span(leaf, box, path, begin + member.data), begin, member, 0)
    return chunk._replace(end=begin + member.data + nbytes + len(chunk.rest(0)))


class Table:
    """What `.metadata` says, and the file of values as it grows."""

    def __init__(self, path: str) -> None:
        self._path, self._at = path, 0
        self._kinds: dict[str, Any] = {}
        self._paths: dict[str, Any] = {}
        self._places: list[tuple[Any, Any]] = []

    def add_chunks(self, path: Path, leaf: Leaf, chunks: Sequence[_Chunk]) -> None:
        """A tensor that lies in chunks; a tied one is listed again, and stored once."""
        self.tensor(path, leaf.dtype, leaf.shape, [chunk.span.box for chunk in chunks])
        for number, chunk in enumerate(chunks):
            offsets = pickles.size(chunk.span.box.offsets)
            self._place(path, offsets, number, chunk.span.path, chunk.begin, chunk.end - chunk.begin)

    def add(self, path: Path, value: Any) -> Iterator[Fixed]:
        """A value, or a tensor at hand, goes into the file of values."""
        if isinstance(value, torch.Tensor):
            dtype, shape = dtypes.name_of(value.dtype), tuple(value.shape)
            data = archive(pickles.tensor(dtype, shape, value.nbytes, "0"), [value])
            self.tensor(path, dtype, shape, [whole(shape)])
            self._place(path, pickles.size((0,) * len(shape)), 0, self._path, self._at, len(data))
        else:
            tensors: list[torch.Tensor] = []

            def replaced(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                tensors.append(leaf)
                return pickles.tensor(dtypes.name_of(leaf.dtype), tuple(leaf.shape), leaf.nbytes, str(len(tensors) - 1))

            tree = mapped(value, replaced)
            data = archive(tree, tensors)
            self.value(path)
            self._place(path, None, None, self._path, self._at, len(data))
        yield Fixed(self._path, self._at, data)
        self._at += len(data)

    def value(self, path: Path) -> None:
        """Note that there is a value."""
        self._paths[_fqn(path)] = path
        self._kinds[_fqn(path)] = Instance(Global(_META, "BytesStorageMetadata"), {})

    def tensor(self, path: Path, dtype: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        """Note that there is a tensor, in these boxes."""
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        contiguous = Call(Global(_META, "_MEM_FORMAT_ENCODING"), (0,))
        properties = (Global("torch", dtype), layout, False, contiguous, False)
        chunks = [
            Instance(
                Global(_META, "ChunkStorageMetadata"),
                {"offsets": pickles.size(box.offsets), "sizes": pickles.size(box.lengths)},
            )
            for box in boxes
        ]
        self._paths[_fqn(path)] = path
        self._kinds[_fqn(path)] = Instance(
            Global(_META, "TensorStorageMetadata"),
            {
                "properties": Instance(Global(_META, "TensorProperties"), properties),
                "size": pickles.size(shape),
                "chunks": chunks,
            },
        )

    def nowhere(self, path: Path, boxes: Sequence[Box], file: str) -> None:
        """Say of a tensor's boxes, or of a value, that torch's reader would look for them in a ``file``."""
        for index, box in enumerate(boxes):
            self._place(path, pickles.size(box.offsets), index, file, 0, 0)
        if not boxes:
            self._place(path, None, None, file, 0, 0)

    def _place(self, path: Path, offset: Any, index: int | None, file: str, begin: int, nbytes: int) -> None:
        key = Instance(Global(_META, "MetadataIndex"), {"fqn": _fqn(path), "offset": offset, "index": index})
        place = {"relative_path": file, "offset": begin, "length": nbytes}
        self._places.append((key, Instance(Global(_FILES, "_StorageInfo"), place)))

    def metadata(self, saved_as: Mapping[str, str | None] | None = None) -> bytes:
        """The bytes of `.metadata`. ``saved_as``: the path and the id of the save, as torch has them."""
        meta = (
            Instance(Global(_META, "StorageMeta"), {**saved_as, "load_id": None, "modules": []}) if saved_as else None
        )
        fields = {
            "state_dict_metadata": self._kinds,
            "planner_data": self._paths,
            "storage_data": Pairs(self._places),
            "storage_meta": meta,
            "version": _VERSION,
        }
        return pickles.dumps(Instance(Global(_META, "Metadata"), fields))


def _fqn(path: Path) -> str:
    return ".".join(map(str, path))


def _flattened(state: Mapping[str, Any]) -> dict[Path, Any]:
    """The leaves of a state by path, as torch flattens it: a list is one leaf unless it holds tensors or dicts.

    So is a tuple. One that holds tensors would be one large leaf: it is taken for a list.
    """
    leaves: dict[Path, Any] = {}

    def walk(path: Path, node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk((*path, str(key)), value)
        elif type(node) in (list, tuple) and _opens(node):
            for index, value in enumerate(node):
                walk((*path, index), value)
        else:
            leaves[path] = node

    walk((), state)
    return leaves


def _opens(node: Any) -> bool:
    return _holds_tensors(node) or (
        type(node) is list and any(isinstance(x, dict) or (type(x) is list and _opens(x)) for x in node)
    )


def _holds_tensors(node: Any) -> bool:
    if isinstance(node, (Leaf, torch.Tensor)):
        return True
    inner = node.values() if isinstance(node, dict) else node if type(node) in (list, tuple) else ()
    return any(map(_holds_tensors, inner))
