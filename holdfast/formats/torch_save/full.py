"""What `torch.save` wrote: one file of everything, a folder with a file for each part, or a file of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.events import log
from holdfast.formats import members, recognise
from holdfast.formats.assemble import ForeignState
from holdfast.formats.machine.torch_files import is_torch_file, load_file, load_path
from holdfast.formats.machine.zips import Archive, is_zip
from holdfast.formats.members import glanced, prove_all
from holdfast.formats.recognise import Arranged
from holdfast.formats.sharded import has_shards, join_ranks, prove_joined
from holdfast.formats.sources import Stretch, all_of, file
from holdfast.formats.torch_save import training_files
from holdfast.formats.torch_save.training_files import Beside
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place

MAX_FILES = 64
"""A folder with more torch files is no checkpoint of a few parts."""

_KINDS = frozenset(("model", "optimizer"))
_LAST = re.compile(r"(?:.*[-_.])?(?:last|latest)(?:[-_.].*)?", re.IGNORECASE)
_MODEL_STEMS = (
    "model", "pytorch_model", "pytorch_model_fsdp", "model_state", "model_state_dict", "state_dict", "weights",
)  # fmt: skip
"""Which of several state dicts in a folder is the model."""


def read(path: Place) -> ForeignState | None:
    """The checkpoint at ``path``, or None if no file there is one of torch's.

    ``path``: a file of any name, a folder that holds one, or a few that together are one, or a template of the files of
    all ranks. Raises Unsupported for programs and pickled modules, NotACheckpoint for a folder with several, Damaged.
    """
    of_ranks = _read_ranks(path)
    if of_ranks is not None:
        return of_ranks
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        return None
    data = all_of(file(path))
    if not _is_ours(data):
        return None
    content = _arranged(path, data)
    return ForeignState("torch.save", content.state, step=content.step)


def _is_ours(data: Stretch) -> bool:
    # Any zip archive begins like torch's, but has no such pickle; one that is cut short has no directory.
    if not is_torch_file(data):
        return False
    return not is_zip(data) or any(name.endswith("/data.pkl") for name in Archive(data).names)


def _arranged(path: Place, data: Stretch) -> Arranged:
    try:
        tree = load_file(data)
    except Unsupported as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        whole = ". Of a module pickled whole, save module.state_dict() instead" * ("its pickle names" in text)
        raise Unsupported(f"{text}{whole}") from None
    return recognise.arranged(tree, path)


def _read_folder(folder: Place) -> ForeignState | None:
    names = members.listed(folder)
    ours = _torch_files(folder, names)
    beside = training_files.beside(folder, names)
    rest = {name: data for name, data in ours.items() if name not in beside.files}
    if not rest and not beside.state.keys() & _KINDS:
        return None
    last = _last(rest)
    if _is_series(rest):
        if last is None:
            raise _several(folder, rest)
        rest = {last: rest[last]}
    parts = {name: _arranged(folder / name, data) for name, data in rest.items()}
    whole = [name for name, part in parts.items() if part.state.keys() & _KINDS and len(part.state) > 1]
    if len(whole) > 1:
        if last not in whole:
            raise _several(folder, whole)
        parts = {name: part for name, part in parts.items() if name not in whole or name == last}
    joint = _joined(folder, parts, beside)
    if len(parts) > 1 and not joint.state.keys() & _KINDS:
        return None
    used = {*parts, *beside.files}
    others = [name for name in ours if name not in used]
    reading = ", ".join(sorted(used)) + (f", and not {', '.join(others[:10])}" if others else "")
    return ForeignState(
        "torch.save", joint.state, step=joint.step, world_size=beside.world_size,
        reading=reading if len(names) > 1 else "",
        attachments=members.attachments(folder, [name for name in names if name not in used]),
    )  # fmt: skip


def _torch_files(folder: Place, names: Sequence[str]) -> dict[str, Stretch]:
    """Those of the files that are torch's; one under two names counts once, under that which says it is the last."""
    candidates = [name for name in names if not name.endswith((".safetensors", *members.ATTACHED))]
    if len(candidates) > MAX_FILES:
        return {}
    paths: dict[Place, str] = {}
    for name in candidates:
        try:
            path = members.member(folder, name)
        except Damaged as error:
            log.warning("%s: %s is left out: %s", folder, name, error)
            continue
        paths[path] = name if _LAST.fullmatch(Path(name).stem) else paths.get(path, name)
    return {name: data for path, name in paths.items() if _is_ours(data := all_of(file(path)))}


def _is_series(names: Iterable[str]) -> bool:
    """Whether some of the files are called alike but for a number: epochs, steps or ranks."""
    kinds = [re.sub(r"\d+", "0", name) for name in names]
    return len(set(kinds)) < len(kinds)


def _last(names: Iterable[str]) -> str | None:
    """The one file that says by its name that it is the last of several."""
    last = [name for name in names if _LAST.fullmatch(Path(name).stem)]
    return last[0] if len(last) == 1 else None


def _several(folder: Place, names: Iterable[str]) -> NotACheckpoint:
    return NotACheckpoint(
        f"{folder} holds several files of one kind: open one of {', '.join(sorted(names)[:10])}. (If each is what one "
        "rank saved, they are of no format that is known.)"
    )


def _joined(folder: Place, parts: Mapping[str, Arranged], beside: Beside) -> Arranged:
    """The parts of a folder as one state: bare state dicts of model and optimizer by what they are, others by name."""
    state: dict[str, Any] = dict(beside.state)
    steps = [beside.step, *(part.step for part in parts.values())]
    for kind in sorted(_KINDS):
        bare = {name: part.state[kind] for name, part in parts.items() if part.state.keys() == {kind}}
        if bare and kind in state:
            raise _several(folder, bare)
        state.update(_by_kind(kind, bare))
    for name, part in parts.items():
        if len(part.state) > 1 and part.state.keys() & _KINDS:
            if part.state.keys() & state.keys():
                raise _several(folder, parts)
            state.update(part.state)
        elif part.state.keys() not in ({"model"}, {"optimizer"}):
            stem = Path(name).stem
            state[name if stem in state else stem] = part.state
    return Arranged(state, next((step for step in steps if step is not None), None))


def _by_kind(kind: str, held: Mapping[str, Any]) -> dict[str, Any]:
    if len(held) < 2:
        return {kind: next(iter(held.values()))} if held else {}
    main = [name for name in held if kind == "model" and Path(name).stem in _MODEL_STEMS]
    if len(main) == 1:
        return {("model" if name in main else Path(name).stem): value for name, value in held.items()}
    return {kind: {Path(name).stem: value for name, value in held.items()}}


RANK = "{rank}"

_NUMBER = re.compile(r"[0-9]+")


def _read_ranks(path: Place) -> ForeignState | None:
    """The files that a template names (``model_rank{rank}.pt``), or that a folder holds, joined; None for no such.

    Of a folder the files of torch must be called alike but for one number, 0 to the last, and hold sharded tensors.
    Raises Damaged for a missing rank, Unsupported for parts of which nothing says where they belong.
    """
    files = _template(path) if RANK in str(path) else _series(path) if path.is_dir() else {}
    if not files:
        return None
    prove_all(files.keys(), max(files) + 1, path, lambda rank: f"the file of rank {rank}")
    trees = [load_path(files[rank]) for rank in glanced(sorted(files), files.__getitem__)]
    tree = join_ranks(trees, f"{path}: ")
    prove_joined({"": tree}, path, "save DTensors, or with torch.distributed.checkpoint")
    content = recognise.arranged(tree, path)
    reading = f"{files[0].name} to {files[len(files) - 1].name} are what {len(files)} ranks saved"
    reading = "" if RANK in str(path) else reading
    return ForeignState("torch.save", content.state, content.step, len(files), reading=reading)


def _template(path: Place) -> dict[int, Place]:
    """The files of a template by rank; the rank stands in one of the path's parts, with or without leading zeros."""
    at = [i for i, part in enumerate(path.parts) if RANK in part]
    if len(at) != 1 or path.parts[at[0]].count(RANK) != 1:
        return {}
    above, part, below = LocalPlace(*path.parts[: at[0]]), path.parts[at[0]], path.parts[at[0] + 1 :]
    pattern = re.compile("([0-9]{1,7})".join(map(re.escape, part.split(RANK))))
    if not above.is_dir():
        return {}
    names = members.folders(above) if below else members.listed(above)
    files: dict[int, Place] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None and above.joinpath(name, *below).is_file():
            if int(match[1]) in files:
                raise Damaged(f"{path} names two files of rank {int(match[1])}, with and without leading zeros")
            files[int(match[1])] = above.joinpath(name, *below)
    return files if all(is_torch_file(all_of(file(p))) for p in files.values()) else {}


def _series(folder: Place) -> dict[int, Place]:
    """The torch files of a folder by the only number in which their names differ, if the first holds shards."""
    names = [n for n in members.listed(folder) if not n.endswith((".safetensors", *members.ATTACHED))]
    if len(names) < 2 or len({_NUMBER.sub("#", name) for name in names}) != 1:
        return {}
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    apart = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(apart) != 1:
        return {}
    files = {number[apart[0]]: folder / name for number, name in zip(numbers, names, strict=True)}
    first = files.get(0)
    if first is None or len(files) < len(names) or not is_torch_file(all_of(file(first))):
        return {}
    return files if has_shards(load_path(first)) else {}
