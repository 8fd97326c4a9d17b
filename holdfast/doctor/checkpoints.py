"""Diagnoses a path that does not open or load, and names the next command. Changes nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.commit.commit import finished
from holdfast.commit.folder import is_orphan, may_hold_orphans, unfinished, what_is_lent
from holdfast.commit.reused import Reuses, who_reuses
from holdfast.commit.sections import dropped_of
from holdfast.doctor.finding import Finding
from holdfast.doctor.mending import BRING_BACK, command, fits, lacking, mend, neighbours, steps_in
from holdfast.errors import Damaged, HoldfastError, Mismatch, NotACheckpoint, StorageError, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest, part
from holdfast.ranks.heartbeat import amount
from holdfast.read.damage import Damage, by_fault, hit_by
from holdfast.repair.rescue import rescuable
from holdfast.run import going_back
from holdfast.run.going_back import WentBack
from holdfast.run.steps import Steps
from holdfast.run.whole import fault_of, lacking_files
from holdfast.storage import storage
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline

NAME = "checkpoint"
DEADLINE = 60.0
"""Seconds to wait for any one answer of a store."""

FEW = 5
"""Steps, files or neighbours that are named."""


def diagnose(path: str | os.PathLike[str] | Place) -> list[Finding]:
    """What is at ``path``, and what is wrong with it. Raises StorageError."""
    place = with_default_deadline(location(path), DEADLINE)
    above = _checkpoint_around(place)
    if above is not None:
        text = f"{place} is a part of the checkpoint {above}"
        return [_missing(text, f"give its folder: {command('show', above)}")]
    if place.has_folders and not place.exists():
        return [_nothing_at(place)]
    if (place / manifest.FILE_NAME).is_file():
        return _ours(place)
    steps = steps_in(place)
    if steps:
        return _run(place, steps)
    files = place.files_below()
    if any(datafile.save_of(name) or name.startswith("parts/") for name in files if is_orphan(name)):
        return [_uncommitted(place, files)]
    begun = unfinished(files)
    if begun or (files and all(name.startswith(f"{storage.JOURNAL}/") for name in files)):
        return _before_the_first(place, begun)
    if not files and not _is_file(place):
        return [_empty(place)]
    if not _is_file(place) and any(steps_in(place / name) for name in place.folder_names()):
        return [Finding(NAME, "ok", f"{place} is a folder of runs", f"{command('ls', place)} lists them")]
    return _foreign(place, files)


def advice(path: str) -> str:
    """What to do about a local ``path`` that does not open; empty if that is unknown."""
    try:
        findings = [] if location(path).is_remote else diagnose(path)  # in a store looking around costs requests
    except (HoldfastError, OSError, ValueError):
        return ""
    return next((one.mend for one in findings if one.mend), "")


def _missing(text: str, mend: str) -> Finding:
    return Finding(NAME, "fail", text, mend, "no checkpoint")


def _damaged(text: str, mend: str) -> Finding:
    return Finding(NAME, "fail", text, mend, "damaged")


def _faults(hurt: Iterable[Damage], mend: str) -> list[Finding]:
    """One finding for each of the first faults, however many tensors it hits."""
    return [_damaged(f"{hit_by(fault) or fault[0].file}: {fault[0].what}", mend) for fault in by_fault(hurt)[:FEW]]


def _checkpoint_around(place: Place) -> Place | None:
    """The checkpoint that a file or folder is a part of."""
    for above in (place.parent, place.parent.parent):
        if place != above and (above / manifest.FILE_NAME).is_file():
            inside = str(place.relative_to(above))
            files = above.files_below()
            if inside in files or any(name.startswith(f"{inside}/") for name in files if not name.startswith("../")):
                return None if (place / manifest.FILE_NAME).is_file() else above
    return None


def _nothing_at(place: Place) -> Finding:
    partial = place.with_name(f"{place.name}.partial")
    if partial.is_dir():
        text = f"there is nothing at {place} yet: a conversion to it is under way, or broke off"
        clean = command("prune", "--orphans", place.parent)
        return _missing(text, f"run the same command again, which goes on from there; or {clean}")
    above = next(path for path in place.parents if path.exists())
    first = place.relative_to(above).parts[0]
    kin = sorted(path.name for path in above.iterdir()) if above.is_dir() else []
    near = get_close_matches(first, kin, n=1, cutoff=0.6)
    text = f"there is nothing at {place}"
    if near:
        meant = above / "/".join([near[0], *place.relative_to(above).parts[1:]])
        return _missing(text, f"did you mean {meant}? {command('ls', above)} lists what is there")
    return _missing(text, f"{command('ls', above)} lists what is there")


def _ours(place: Place) -> list[Finding]:
    try:
        record = read_manifest(place)
    except Damaged as error:
        return [_damaged(str(error), _rescue(place)[1])]
    except Unsupported as error:
        return [Finding(NAME, "fail", str(error), "pip install --upgrade holdfast-torch", "damaged")]
    except NotACheckpoint:
        return _foreign(place, place.files_below())
    advised = mend(place)
    findings = [_damaged(text, advised) for text in list(lacking_files(place, record).values())[:FEW]]
    if not findings:
        hurt = Checkpoint(place).verify(deep=False, raises=False).damages
        findings = _faults(hurt, advised)
    lost = dropped_of(record)
    if lost:
        text = f"it has lost {', '.join(lost)} since it was saved"
        findings.append(Finding(NAME, "warn", text, 'load what is left with only=, such as only="model"'))
    if not any(one.verdict == "fail" for one in findings):
        nbytes = sum(file.bytes for file in record.data_files)
        step = "" if record.step is None else f" of step {record.step}"
        text = f"{place}{step}: {len(record.tensors)} tensors, {nbytes} bytes, whole by its manifest and headers"
        findings.insert(0, Finding(NAME, "ok", f"{text}; {command('verify', place)} reads every byte"))
    files = place.files_below()
    named = {file.path for file in record.data_files}
    if may_hold_orphans([path for path in files if path not in named or path == manifest.FILE_NAME]):
        text = "files lie beside it that it does not name"
        findings.append(Finding(NAME, "warn", text, command("prune", "--orphans", place)))
    return findings


def _run(root: Place, steps: Sequence[Place]) -> list[Finding]:
    counting, findings = _counting(root, steps)
    steps_there = "1 checkpoint" if len(steps) == 1 else f"{len(steps)} checkpoints"
    text = f"{root} is the folder of a run, with {steps_there}: the newest is {counting[-1].name}"
    left = len(steps) - len(counting)
    text += f"; training went back, and goes on without {left} later {'one' if left == 1 else 'ones'}" if left else ""
    findings.insert(0, Finding(NAME, "ok", text, f"{command('ls', root)} lists them"))
    for step in steps[-FEW:]:
        fault = fault_of(step)
        if fault is not None:
            findings.append(_damaged(f"{step.name}: {fault}", command("doctor", step)))
    findings += [*_other_runs(root, counting), *_room_for_another(root, counting[-1])]
    citations = Reuses(root)
    for name in sorted(set(root.folder_names()) - {step.name for step in steps}):
        files = (root / name).files_below()
        lent_to = who_reuses(root / name, [path for path in files if is_orphan(path)], citations)
        if lent_to:
            findings.append(Finding(NAME, "ok", f"{name} is {what_is_lent(lent_to)}"))
        elif any(datafile.save_of(path) for path in files):
            one = _uncommitted(root / name, files)
            findings.append(Finding(NAME, "warn", one.text, one.mend, one.kind))
    return findings


def _room_for_another(root: Place, newest: Place) -> Iterator[Finding]:
    """Whether the disk has room for one more step like the newest."""
    if root.is_remote:
        return
    status, nbytes = os.statvfs(root), sum(newest.sizes_below().values())
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        text = f"{amount(free)} are free, and {newest.name} takes {amount(nbytes)}: the next save may not fit"
        clear = f"{command('prune', root)}, and the same with --orphans, list what can be deleted"
        yield Finding("free space", "warn", text, clear, "storage")


def _counting(root: Place, steps: Sequence[Place]) -> tuple[Sequence[Place], list[Finding]]:
    """The steps that training did not leave behind when it went back; and what is wrong with the mark that says so."""
    try:
        mark = going_back.read(root)
    except Damaged as error:
        return steps, [_damaged(str(error), command("ls", root))]
    asked = Steps(root, "{step}")
    behind = {step for step in steps if mark is not None and _is_behind(asked, step, mark)}
    return [step for step in steps if step not in behind] or steps, []


def _is_behind(asked: Steps, step: Place, mark: WentBack) -> bool:
    made = asked.made_by(step)
    return made is not None and made.save in mark.saves


def _other_runs(root: Place, steps: Sequence[Place]) -> list[Finding]:
    """Steps of another run that were saved after the newest, with which a restore does not know where to go on."""
    try:
        Steps(root, "{step}").refuse_another_run(steps[-1], among=steps)
    except Mismatch as error:
        return [Finding(NAME, "fail", str(error), f"{command('ls', root)} shows whose each step is", "mismatch")]
    except StorageError:  # the newest one cannot be read, which is a finding already
        return []
    return []


def _before_the_first(root: Place, begun: Sequence[str]) -> list[Finding]:
    """The folder of a run that has not saved yet, or whose saves all died."""
    findings = [_uncommitted(root / name, (root / name).files_below()) for name in begun[-FEW:]]
    text = f"no step was saved here yet: {root} is the folder of a run"
    if not findings:
        shown = f"{command('watch', root)} shows where the run is; a step is here once its first save has ended"
        return [Finding(NAME, "warn", text, shown, "no checkpoint")]
    if any(one.verdict == "warn" for one in findings):  # one is under way
        return [Finding(NAME, "warn", text, f"{command('watch', root)} shows how it saves", "no checkpoint"), *findings]
    return [_missing(f"{text}, and none of its saves has committed", findings[-1].mend), *findings]


def _empty(place: Place) -> Finding:
    if place.is_remote:
        return _missing(f"there is nothing at {place}", f"{command('ls', place.parent)} lists what is beside it")
    text = f"no step was saved here yet: {place} is empty"
    return _missing(
        text, f"is it what the training script saves to? {command('ls', place.parent)} lists what is beside it"
    )


def _uncommitted(place: Place, files: Sequence[str]) -> Finding:
    lent_to = who_reuses(place, [path for path in files if is_orphan(path)])
    if lent_to:
        text = f"{place} is {what_is_lent(lent_to)}"
        return _missing(text, f"take one of these, and leave its files where they are; {command('ls', place.parent)}")
    if place.living([path for path in files if datafile.save_of(path)]):
        if place.is_remote:
            text = f"{place} holds no manifest.json, and files younger than six hours: a save may be under way"
        else:
            text = f"a save to {place} is under way"
        return Finding(NAME, "warn", text, "wait: it is a checkpoint once its manifest.json is there", "no checkpoint")
    save = finished(place)
    if save is not None:
        text = f"{place}: all ranks finished save {save}, but it was never committed"
        return _missing(text, command("rescue", place))
    text, mend = _rescue(place)
    if not text:
        text = f"a save that died before all of it was written{_absent(place, files)}; it is no checkpoint"
        if len({save for path in files if (save := datafile.save_of(path))}) > 1:
            text = (
                "files of several saves, and no manifest.json to say which belong together: a save that died, or one "
                "that reused files of older steps and whose manifest was deleted"
            )
        mend += f"; {command('prune', '--orphans', place)} shows what can be deleted"
    return _missing(f"{place}: {text}", mend)


def _rescue(place: Place) -> tuple[str, str]:
    """What can be made of data files without a manifest (empty if nothing can), and the command that does it."""
    older = neighbours(place)
    for like in [None, *older[-1:]]:
        try:
            origin, lost = rescuable(place, like)
        except (Damaged, Mismatch, NotACheckpoint, Unsupported):
            continue  # a step of the run beside it holds more
        except StorageError:
            if like is None:
                raise
            continue  # that step cannot be read
        if origin == "headers" and like is None and older:
            if fits(place, older[-1]):
                continue  # it knows what headers do not
            if gone := lacking(place, older[-1]):
                text = f"its manifest.json is missing, and that is not all: {gone}"
                return text, f"{_take_older(older)}; or, if there is a copy: {command('rescue', place)} --like COPY"
        text = "its manifest.json is missing, and its data files are whole"
        if origin == "headers":
            text += f"; what headers do not hold: {'; '.join(lost) or 'nothing'}"
        return text, command("rescue", place) + (f" --like {shlex.quote(str(like))}" if like is not None else "")
    return "", f"{_take_older(older)}; or, if there is a copy of this one: {command('rescue', place)} --like COPY"


def _take_older(older: Sequence[Place]) -> str:
    return f"take an older step ({older[-1]}), as a restore of the run does" if older else "take another checkpoint"


def _absent(place: Place, files: Sequence[str]) -> str:
    """Which ranks never finished, if others left word of it."""
    there: set[int] = set()
    world = 0
    for path in files:
        if part.save_of(path) is not None and path.endswith(".json"):
            try:
                one = part.decode((place / path).read_small(), str(place / path))
            except (Damaged, Unsupported, FileNotFoundError):
                continue  # half a part: its rank had not finished
            there.add(one.rank)
            world = max(world, one.world_size)
    lacking = sorted(set(range(world)) - there)
    if not lacking:
        return ""
    named = ", ".join(map(str, lacking[:FEW])) + (", …" if len(lacking) > FEW else "")
    return f" ({len(there)} of {world} ranks had finished, not {named})"


def _foreign(place: Place, files: Sequence[str]) -> list[Finding]:
    formats = "docs/formats.md says what its reader expects"
    try:
        opened = open_checkpoint(place)
        hurt = opened.verify(deep=False, raises=False).damages
    except NotACheckpoint as error:
        return [_elsewhere(place, str(error))]
    except Damaged as error:
        return [
            _damaged(str(error), f"bring back the files that are missing or cut, from where it was copied; {formats}")
        ]
    except Unsupported as error:
        return [Finding(NAME, "fail", str(error), formats, "damaged")]
    if hurt:
        return _faults(hurt, BRING_BACK)
    text = f"{place} is read as {opened.format}: {len(opened.tensors)} tensors, all files are there"
    return [Finding(NAME, "ok", f"{text}; {command('verify', place)} reads every byte")]


def _elsewhere(place: Place, text: str) -> Finding:
    """A checkpoint of another format may lie one folder up, or down."""
    near = [place.parent, *(place / name for name in (place.folder_names() if not _is_file(place) else [])[:FEW])]
    for other in near:
        try:
            opened = open_checkpoint(other)
        except (HoldfastError, OSError):
            continue  # nothing to be opened there either
        return _missing(f"{place} is no checkpoint, {other} is one ({opened.format})", command("show", other))
    if "docs/formats.md" not in text:  # it is known what it is, and it is not all of it
        return _missing(text, f"take another checkpoint: {command('ls', place.parent)} lists what is beside it")
    return _missing(text, "docs/formats.md lists what can be read; convert others with the program that wrote them")


def _is_file(place: Place) -> bool:
    return place.is_file()
