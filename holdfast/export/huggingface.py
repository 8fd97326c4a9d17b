"""Hugging Face's format: safetensors files of bounded size, an index, and the model's own small files beside them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.checkpoint import Checkpoint
from holdfast.commit.gather import read_attachments
from holdfast.errors import Mismatch, StorageError, Unsupported
from holdfast.export.draft import Draft, Fixed, Span, packed
from holdfast.export.selection import Leaf, Selection
from holdfast.ondisk import dtypes, names
from holdfast.ondisk.box import whole
from holdfast.ondisk.manifest import NOTES
from holdfast.ondisk.patterns import Patterns, matcher, names_in, near
from holdfast.storage.local.disk import SECTOR

Extras = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str] | bytes]
"""Files to carry over: one, several, a folder (its files that are no weights), or names with paths or bytes."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
# Two more than every reader of a native data file is asked to know: Hugging Face's own reader knows them.
_YOUNG_CODES = {"complex64": "C64", "float8_e8m0fnu": "F8_E8M0"}


def section_of(checkpoint: Checkpoint, only: Patterns) -> str:
    """The path whose tensors are the model: ``model`` if there is one, else what was asked for, or all there is.

    Raises Mismatch if that may be several things.
    """
    tensors = list(filter(matcher(only, known=names_in(checkpoint.manifest)), checkpoint.records))
    section = only.rstrip("/") if isinstance(only, str) and not set(only) & set("*?[") else None
    if section is not None and tensors and all(name.startswith(section + "/") for name in tensors):
        return section
    if any(name.startswith("model/") for name in tensors):
        return "model"
    heads = sorted({names.section_of(name) for name in tensors if "/" in name})
    if not heads:
        return ""
    if len(heads) == 1 and all("/" in name for name in tensors):
        return heads[0]
    raise Mismatch(
        f"{checkpoint.path} has no section model, but tensors in {', '.join(heads)}"
        f"{' and at the top' if not all('/' in name for name in tensors) else ''}: say which are the model by only="
    )


def bare(section: str) -> Callable[[str], str]:
    """How a name of that section stands in the target: without it, keys joined by points."""
    skip = len(section) + 1 if section else 0
    return lambda name: ".".join(names.split(name[skip:]))


def draft(selection: Selection, *, max_file_bytes: int, small: Mapping[str, bytes]) -> Draft:
    """The shards, each at most ``max_file_bytes`` of tensors if they let it, and the ``small`` files as they are."""
    shards = packed(selection.tensors.values(), max_file_bytes)
    tied: dict[str, dict[str, str]] = {}
    for alias, name in selection.aliases.items():
        tied.setdefault(name, {})[alias] = name
    fixed, spans, files, where = [], [], {}, {}
    for number, shard in enumerate(shards):
        path = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        # Of one width those that are whole sectors come first, so that most begin at one.
        shard = sorted(shard, key=lambda leaf: (-leaf.itemsize, leaf.nbytes % SECTOR != 0))
        header = _header(shard, {a: n for leaf in shard for a, n in tied.get(leaf.name, {}).items()})
        at = len(header)
        for leaf in shard:
            spans.append(Span(leaf, whole(leaf.shape), path, at))
            where[leaf.name] = path
            at += leaf.nbytes
        fixed.append(Fixed(path, 0, header))
        files[path] = at
    if len(shards) > 1:
        total = sum(leaf.nbytes for leaf in selection.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        fixed.append(Fixed("model.safetensors.index.json", 0, (json.dumps(index, indent=2) + "\n").encode()))
    written = {f.path for f in fixed}
    clash = sorted(written & small.keys())
    if clash:
        raise Mismatch(f"{clash[0]} is written by the conversion itself; leave it out of extras=")
    fixed += [Fixed(name, 0, data) for name, data in small.items()]
    return Draft(files, spans, "none", lambda sums: iter(fixed))


def _header(leaves: Sequence[Leaf], tied: Mapping[str, str]) -> bytes:
    # The names of tied tensors are left to the metadata, as safetensors does it: a reader ties them again.
    header: dict[str, object] = {"__metadata__": {**tied, "format": "pt"}}
    at = 0
    for leaf in leaves:
        code = dtypes.code_of(leaf.dtype) or _YOUNG_CODES.get(leaf.dtype)
        if code is None:
            raise Unsupported(
                f"{leaf.name} is {leaf.dtype}, which safetensors cannot name: leave it out by only=, or cast by dtype="
            )
        if leaf.name in header:
            raise Mismatch(f"a tensor cannot be called {leaf.name!r} in a safetensors file; rename= maps it")
        header[leaf.name] = {"dtype": code, "shape": leaf.shape, "data_offsets": [at, at + leaf.nbytes]}
        at += leaf.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % SECTOR)
    return len(text).to_bytes(8, "little") + text


def small_files(checkpoint: Checkpoint, extras: Extras | None) -> dict[str, bytes]:
    """What the checkpoint has attached, but for its manager's own note, and over it what is given.

    Raises StorageError, Unsupported for a bad name.
    """
    files = {name: checkpoint.attachment(name) for name in checkpoint.attachments if name != NOTES}
    return files | read_attachments(by_name(extras))


def by_name(extras: Extras | None) -> dict[str, str | os.PathLike[str] | bytes]:
    """Extras by the names that they get. Raises StorageError for a path at which there is nothing."""
    if isinstance(extras, Mapping):
        return dict(extras)
    paths = [extras] if isinstance(extras, (str, os.PathLike)) else list(extras or [])
    return {inner.name: inner for path in paths for inner in _listed(Path(path).expanduser())}


def _listed(path: Path) -> list[Path]:
    if not path.exists():
        kin = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        error = StorageError(f"there is nothing at extras={str(path)!r}{near(path.name, kin)}")
        error.errno = errno.ENOENT
        raise error
    if not path.is_dir():
        return [path]
    return [inner for inner in sorted(path.iterdir()) if inner.is_file() and not inner.name.endswith(_WEIGHTS)]
