"""Weights as Hugging Face's libraries keep them: safetensors and `.bin` files, whole, sharded, or by torch's DCP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.events import log
from holdfast.formats import fqns, members, recognise
from holdfast.formats.assemble import ForeignState
from holdfast.formats.huggingface import safetensors_files, weight_sets
from holdfast.formats.huggingface.safetensors_files import OFFSETS, VERSION, Contents, Part, kind_of, united
from holdfast.formats.huggingface.weight_sets import OF_RANKS, SHARDS, WeightSet
from holdfast.formats.machine import torch_files
from holdfast.formats.machine.untrusted import MAX_JSON, damaged_as, read_whole
from holdfast.formats.members import glanced
from holdfast.formats.sources import all_of, file
from holdfast.formats.stored import Stored
from holdfast.formats.torch_save import full, training_files
from holdfast.ondisk import datafile
from holdfast.storage.place import Place

_OURS = frozenset(("holdfast", "save", "rank", "section", "shapes", "dtypes", "sums"))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


def read(path: Place) -> ForeignState | None:
    """The weights at ``path`` and what a trainer left beside them, or None if there are none of this kind.

    ``path``: a file of weights, an index, a folder of either (one in a Hugging Face cache, too), or the folder of a
    Trainer's run, of which the newest checkpoint is read.
    """
    if path.is_dir():
        if any(datafile.save_of(f"{path.name}/{name}") for name in members.listed(path)):
            # Only the manifest above says whether they are whole and of one save.
            raise NotACheckpoint(f"{path} holds data files of a save of holdfast: open the folder above, {path.parent}")
        cached = members.snapshot(path)
        return _read_folder(cached or path, f"the snapshot {cached.name}" if cached else "")
    if not path.is_file():
        return None
    index = weight_sets.index_of(path.name)
    return _read_set(path.parent, [index], "") if index else _read_file(path)


def _read_file(path: Place) -> ForeignState | None:
    data = all_of(file(path))
    safe = path.suffix == ".safetensors" or safetensors_files.is_safetensors(data)
    count = weight_sets.shard_count(path.name)
    if not safe and (count == 1 or not torch_files.is_torch_file(data)):
        return None
    contents = _load(path, safe=safe)
    ranks = weight_sets.of_ranks([path.name])
    if ranks and OFFSETS in contents.metadata:
        # The shapes follow only from the offsets in the files of all ranks.
        every = weight_sets.of_ranks(members.listed(path.parent)) or ranks
        return _read_set(path.parent, [every], f"the files of all ranks in {path.parent}")
    reading = f"this file alone, one of {count}: its folder has the whole" if count > 1 else ""
    if reading:
        log.warning("%s: read is %s", path, reading)
    tensors, producer = united([(path, contents)])
    state = {"model": fqns.model_state(tensors), **_metadata([(path, contents)], {})}
    return ForeignState("safetensors" if safe else "Hugging Face", state, producer=producer, reading=reading)


def _read_folder(folder: Place, reading: str) -> ForeignState | None:
    names = members.listed(folder)
    candidates = weight_sets.sets(names)
    below = folder / "sharded"
    if (not candidates or candidates[0].form == SHARDS) and below.is_dir():
        # DCP joins the files of the ranks into those above them, and writes the index when it is done.
        ranks = weight_sets.of_ranks(members.listed(below))
        if ranks:
            return _read_set(below, [ranks], "sharded/: the files above it were never joined")
    if not candidates:
        return _newest(folder, names)
    first = candidates[0]
    if not first.likely and len(candidates) > 1:
        raise NotACheckpoint(
            f"{folder} holds several weights: open one of {', '.join(s.title for s in candidates[:10])}"
        )
    return _read_set(folder, [first, *(s for s in candidates[1:] if s.further and s.kind == first.kind)], reading)


def _newest(folder: Place, names: Sequence[str]) -> ForeignState | None:
    """The newest checkpoint in the folder of a run."""
    if "model_index.json" in names:
        models = ", ".join(members.folders(folder)[:20])
        raise NotACheckpoint(f"{folder} is a pipeline of diffusers: open one of its models, of {models}")
    newest = members.newest(folder, training_files.is_complete)
    content = newest and (_read_folder(newest[0], "") or full.read(newest[0]))
    return content and newest and replace(content, reading="; ".join(filter(None, [newest[1], content.reading])))


def _read_set(folder: Place, chosen: Sequence[WeightSet], reading: str) -> ForeignState:
    """Weights of a folder and what lies beside them."""
    parts: list[Part] = []
    models: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    producer: dict[str, str] = {}
    for weights in chosen:
        index = _read_index(members.member(folder, weights.index)) if weights.index else None
        own = _parts(folder, weights, index)
        tensors, by = united(own)
        if index is not None:
            _check_index(folder / weights.index, index, own)
            metadata.update(index.metadata or {})
            tensors = {name: tensors[name] for name in index.weight_map}
        if weights.form != OF_RANKS:
            _mend_numbers(folder / "sharded", tensors)
        models[weights.stem] = fqns.model_state(tensors)
        parts += own
        producer.update(by)
    used = {path.name for path, _ in parts}
    names = [n for n in members.listed(folder) if n not in used and weight_sets.index_of(n) is None]
    beside = training_files.beside(folder, names)
    state = {"model": models if len(models) > 1 else models[chosen[0].stem], **_metadata(parts, metadata)}
    state.update(("model_fsdp" if key == "model" else key, value) for key, value in beside.state.items())
    format, world_size = "Hugging Face", beside.world_size
    if chosen[0].form == OF_RANKS:
        format, world_size = "torch.distributed.checkpoint (safetensors)", chosen[0].world_size()
        reading = f"{reading or 'the files of the ranks'}, of {world_size}: the format does not say if these are all"
    attached = members.attachments(folder, [n for n in names if n not in beside.files])
    unread = [n for n in names if n not in beside.files and n not in attached]
    if unread:
        reading = f"{reading or ', '.join(s.title for s in chosen)}, and not {', '.join(unread[:10])}"
    return ForeignState(
        format, state, step=beside.step, world_size=world_size, producer=producer, reading=reading,
        attachments=attached,
    )  # fmt: skip


def _load(path: Place, *, safe: bool) -> Contents:
    data = all_of(file(path))
    if not safe:
        safetensors_files.refuse_pointer(data)
        tree = torch_files.load_file(data)
        if not recognise.is_model_state(tree):
            raise Unsupported(f"{path} holds something else than weights, or more; open that file by itself")
        return Contents(recognise.whole_tensors(tree, path), {})
    contents = safetensors_files.load_file(data)
    header = contents.metadata
    if "holdfast" in header and any(header.get(key, "{}") != "{}" for key in ("shapes", "dtypes")):
        raise NotACheckpoint(f"{path} is a data file of a checkpoint of holdfast; open that, {path.parent.parent}")
    return contents


def _parts(folder: Place, weights: WeightSet, index: _Index | None) -> list[Part]:
    files: Iterable[str] = weights.files if index is None else sorted(set(index.weight_map.values()))
    if index is None and weights.form == SHARDS and weights.missing():
        raise Damaged(
            f"{folder} should hold {weights.count} files like {weights.files[0]}; number "
            f"{', '.join(map(str, weights.missing()[:10]))} is missing: fetch the rest"
        )
    by = weights.index if index is not None else ""
    files_found = [(folder / f, members.member(folder, f, by)) for f in files]
    safe = weights.kind != "bin"
    return [(path, _load(real, safe=safe)) for path, real in glanced(files_found, lambda pair: pair[1])]


def _read_index(path: Place) -> _Index:
    with damaged_as(f"{path} is no index of weights"):
        index = msgspec.json.decode(read_whole(path, MAX_JSON), type=_Index)
    if not index.weight_map:
        raise Damaged(f"{path} is an index of no weights")
    return index


def _check_index(path: Place, index: _Index, parts: Sequence[Part]) -> None:
    """Raise Damaged if the index and the headers of its files list different names."""
    held = dict(zip(sorted(set(index.weight_map.values())), (contents.tensors for _, contents in parts), strict=True))
    lost = [(name, where) for name, where in index.weight_map.items() if name not in held[where]]
    if lost:
        name, where = lost[0]
        raise Damaged(f"{path} says that {name!r} is in {where}, which does not hold it ({len(lost)} such names)")
    more = [(name, where) for where, tensors in held.items() for name in tensors if name not in index.weight_map]
    if more:
        name, where = more[0]
        raise Damaged(
            f"{path} does not list {name!r}, which {where} holds ({len(more)} such names): the index is of other "
            "files; without it these are read as they are"
        )


def _metadata(parts: Sequence[Part], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of index and headers in one dict; by file where they differ."""
    sources: dict[str, dict[str, Any]] = {key: {"index": value} for key, value in metadata.items()}
    for path, contents in parts:
        ours = _OURS if "holdfast" in contents.metadata else frozenset()
        for key, value in contents.metadata.items():
            if key not in (OFFSETS, VERSION) and key not in ours:
                sources.setdefault(key, {})[path.name] = value
    joint = {key: next(iter(v.values())) if len({*map(repr, v.values())}) == 1 else v for key, v in sources.items()}
    return {"metadata": joint} if joint else {}


def _mend_numbers(sharded: Place, tensors: dict[str, Any]) -> None:
    """Take 0-dimensional tensors from the files of the ranks: torch (2.13) leaves them zero where it joins those."""
    numbers = [name for name, tensor in tensors.items() if isinstance(tensor, Stored) and tensor.shape == ()]
    ranks = weight_sets.of_ranks(members.listed(sharded)) if numbers and sharded.is_dir() else None
    if ranks is None:
        return
    by_rank, _ = united(_parts(sharded, ranks, None))
    mended = {
        name: by_rank[name] for name in numbers if name in by_rank and kind_of(by_rank[name]) == kind_of(tensors[name])
    }
    tensors.update(mended)
    if mended:
        log.warning(
            "%s: %d tensors without axes, %s first, are read from here: torch leaves them zero where it joins files",
            sharded, len(mended), min(mended),
        )  # fmt: skip
