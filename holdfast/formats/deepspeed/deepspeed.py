"""DeepSpeed: a run folder with `latest`, or the folder of one tag, saved by ranks or as a universal checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from holdfast.errors import Damaged, NotACheckpoint
from holdfast.formats import members
from holdfast.formats.assemble import ForeignState
from holdfast.formats.deepspeed.ranks import is_rank_file, read_ranks
from holdfast.formats.deepspeed.universal import is_universal, read_universal
from holdfast.formats.machine.untrusted import read_whole
from holdfast.formats.members import glanced
from holdfast.formats.sources import all_of, file
from holdfast.formats.torch_save.training_files import beside
from holdfast.storage.place import Place

_LATEST = ("latest", "latest_universal")
_NOT_ATTACHED = frozenset(["zero_to_fp32.py", "zero_to_torch.py"])
MAX_TAG = 4096
"""Bytes of a file that names a tag; longer ones are something else."""


def read(path: Place) -> ForeignState | None:
    """The checkpoint of DeepSpeed at ``path``: a run folder, or the folder of a tag. None if it is neither."""
    if not path.is_dir():
        return None
    if _is_tag(path):
        return _read_tag(path, "")
    chosen = _chosen(path)
    return None if chosen is None else _with_trainer(path, _read_tag(*chosen))


def _read_tag(folder: Place, reading: str) -> ForeignState:
    names = glanced(filter(is_rank_file, members.names(folder)), lambda name: folder / name)
    files = {name: all_of(file(folder / name)) for name in names}
    return read_universal(folder, files, reading) if is_universal(folder) else read_ranks(files, folder, reading)


def _with_trainer(run: Place, tag: ForeignState) -> ForeignState:
    """What Hugging Face's Trainer or Accelerate leaves beside `latest`: scheduler, RNG states, its own state."""
    names = members.listed(run)
    more = beside(run, names)
    weights = [name for name in names if name.endswith((".safetensors", ".bin")) and name not in more.files]
    reading = tag.reading + (f"; {', '.join(weights)} beside it not read" if weights else "")
    clashing = {key: value for key, value in more.state.items() if key in tag.state}
    own = {key: value for key, value in more.state.items() if key not in clashing}
    state = {**tag.state, **own, **({"trainer": clashing} if clashing else {})}
    attached = members.attachments(run, (n for n in names if n not in more.files and n not in _NOT_ATTACHED))
    return replace(tag, state=state, reading=reading, attachments=attached)


def _is_tag(folder: Place) -> bool:
    return folder.is_dir() and (is_universal(folder) or any(map(is_rank_file, members.names(folder))))


def _chosen(run: Place) -> tuple[Place, str] | None:
    """The tag of a run folder that is to be read, and why that one. None if the folder is no run of DeepSpeed's."""
    tags = {name: tag for name in _LATEST if (tag := _tag_in(run / name)) is not None}
    for name, tag in tags.items():
        folder = run / tag
        if not members.lies_in(folder, run):
            if _is_named(tag) or _tags_beside(run):
                raise Damaged(f"{run / name} names {tag!r}, which is not in the run folder: nothing outside is read")
            continue
        if _is_tag(folder):
            passed = [f"{other} names {tags[other]}" for other in tags if other != name]
            return folder, ", ".join([f"{name} names {tag}", *(f"{text}, which was not taken" for text in passed)])
    others = _tags_beside(run)
    if len(others) == 1 and not tags:
        return run / others[0], f"{others[0]}, the only tag; there is no file `latest`"
    if others or any(map(_is_named, tags.values())):
        there = f"the tags {', '.join(others)} are there" if others else "no tag is there"
        named = " and ".join(f"{name} names {tag}" for name, tag in tags.items()) or "there is no file `latest`"
        raise NotACheckpoint(
            f"{run} is a run folder of DeepSpeed, but {named}, and {there}: open the folder of the tag that you want"
        )
    return None


def _tag_in(source: Place) -> str | None:
    """What a file `latest` names; None if it is no such file."""
    if not source.is_file() or source.stat().st_size > MAX_TAG:
        return None
    tag = read_whole(source, MAX_TAG).decode("utf-8", "replace").strip()
    return tag if tag and tag.isprintable() else None


def _is_named(tag: str) -> bool:
    return Path(tag).name.startswith("global_step")


def _tags_beside(run: Place) -> list[str]:
    """Folders of tags. Only those with DeepSpeed's own names are looked into, unless its recovery script is there."""
    names = members.names(run)
    ours = "zero_to_fp32.py" in names
    return [name for name in names if (ours or _is_named(name)) and _is_tag(run / name)]
