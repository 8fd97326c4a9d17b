"""Makes the manifest of a checkpoint again, if it is lost or damaged, from what the data files say.

Files of two saves are never joined, and no checkpoint is committed in which a tensor has a hole.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from platform import python_version
from typing import Literal

import msgspec
import torch

from holdfast.commit.commit import commit, commit_late, take_away
from holdfast.commit.folder import ASIDE, taken
from holdfast.commit.transfer import self_contained
from holdfast.errors import Damaged, Mismatch, NotACheckpoint, StorageError
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk import blocks, datafile, manifest, names, part
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.version import __version__
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.damage import Damage, damages
from holdfast.read.examine import examine
from holdfast.read.files import DataFiles
from holdfast.read.rebuild import DataFile, Rebuilt, described, rebuilt
from holdfast.read.source import ReadStats
from holdfast.storage.place import Place
from holdfast.storage.storage import LinkCheck
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

RESCUED = "rescued"
"""The key of ``producer`` under which a manifest says when it was rescued, and where its values are from."""

IN_NO_FILE = ", which the neighbour has, is in no file"
"""The end of a line of the error of `rescue` with ``like``, behind the name of a tensor."""


@dataclass(frozen=True)
class Rescued:
    """What `rescue` brought back. ``origin``: made from the parts of all ranks, a copy's manifest, or headers.

    ``lost`` lists what the checkpoint lost, or has from elsewhere; ``damages`` is what is wrong with the bytes;
    ``tensors`` counts them.
    """

    path: str
    save: str
    step: int | None
    origin: Literal["parts", "copy", "headers"]
    tensors: int
    nbytes: int
    lost: tuple[str, ...]
    damages: tuple[Damage, ...]


def rescue(
    folder: str | os.PathLike[str] | Place, *, like: str | os.PathLike[str] | Place | None = None,
    save: str | None = None, step: int | None = None, deadline: float = DEADLINE,
) -> Rescued:  # fmt: skip
    """Make the manifest of a checkpoint again, if it is lost or cannot be read.

    It is made from the first of these that is there: what all ranks left when they finished their save; what the first
    rank left; the manifest of ``like``, if that is a copy of the same save; else the headers of the data files. Headers
    hold names, shapes, dtypes and sums, but no values (steps, settings), no tied names and no lists. With ``like``, a
    step of the same run, these are taken from there, as they were at its step. Every byte is checked. One process calls
    it, while nobody saves to the folder. A damaged manifest is kept under another name.

    Args:
        folder: The folder of the checkpoint, a path or a URL.
        like: A copy of it, or another step of the same run.
        save: The id of the save to take, if the folder holds files of several.
        step: The step to note; by default the number at the end of the folder's name.
        deadline: Seconds to wait for any one answer of a store.

    Returns:
        What was brought back, what was lost, and what is damaged: `repair` may mend it.

    Raises:
        StorageError: There is a manifest that can be read, or somebody is saving there (EEXIST).
        NotACheckpoint: There are no data files.
        Damaged: No save is whole; it says what lacks.
        Mismatch: It cannot be decided without ``like`` or ``save``, or ``like`` has other tensors.
    """
    target = with_deadline(location(folder), deadline)
    damaged = _damaged_manifest(target)
    if damaged is None and (record := commit_late(target)) is not None:
        return _rescued(target, record, "parts", [])
    paths = target.files_below()
    if isinstance(target, os.PathLike) and target.living([p for p in paths if datafile.save_of(p)]):
        raise taken(f"somebody is saving to {target} right now")
    neighbour = None if like is None else read_manifest(with_deadline(location(like), deadline))
    record, origin, lost = _chosen(target, paths, neighbour, save, step)
    if damaged is not None:
        (target / ASIDE).write_small(damaged)
        lost.append(f"the damaged manifest is kept as {ASIDE}")
        (target / manifest.FILE_NAME).replace_small(
            manifest.encode(record), f".manifest.{record.save}.{secrets.token_hex(4)}.tmp"
        )
    else:
        commit(target, record, replaces=False)
    take_away(target, record.save)
    log.warning("%s: the manifest was made again from %s; %s", target, origin, "; ".join(lost) or "nothing is lost")
    return _rescued(target, record, origin, lost)


def rescuable(
    folder: Place, like: Place | None = None
) -> tuple[Literal["parts", "copy", "headers"], list[str]]:  # fmt: skip
    """What `rescue` would make a manifest of, and what would be lost. Changes nothing; raises what `rescue` raises."""
    neighbour = None if like is None else read_manifest(like)
    _, origin, lost = _chosen(folder, folder.files_below(), neighbour, None, None)
    return origin, lost


def _rescued(
    target: Place, record: Manifest, origin: Literal["parts", "copy", "headers"], lost: list[str]
) -> Rescued:  # fmt: skip
    files = DataFiles(target, record.data_files)
    hurt = damages(record, examine(files, record, ReadStats()), files.folder)
    nbytes = sum(file.bytes for file in record.data_files)
    return Rescued(str(target), record.save, record.step, origin, len(record.tensors), nbytes, tuple(lost), tuple(hurt))


def _damaged_manifest(target: Place) -> bytes | None:
    """The bytes of a manifest that cannot be read; None if there is none. Raises StorageError if it can be."""
    try:
        read_manifest(target)
    except Damaged:
        return (target / manifest.FILE_NAME).read_small()
    except NotACheckpoint:
        if (target / manifest.FILE_NAME).is_file():
            raise  # another program's
        return None
    error = StorageError(
        f"{target} has a manifest that can be read, and needs no rescue; holdfast.tools.repair mends data"
    )
    error.errno = errno.EEXIST
    raise error


def _chosen(
    target: Place, paths: list[str], like: Manifest | None, save: str | None, step: int | None
) -> tuple[Manifest, Literal["parts", "copy", "headers"], list[str]]:
    """The manifest to be committed, what it was made from, and what is lost."""
    files, unread = _data_files(target, paths)
    if not files and not unread:
        raise NotACheckpoint(f"there is nothing to rescue: {target} holds no data file of ours")
    if save is not None and save not in files:
        raise NotACheckpoint(f"{target} holds no data file of save {save}; it has {', '.join(sorted(files)) or 'none'}")
    whole: list[tuple[Manifest, Literal["parts", "copy", "headers"], list[str]]] = []
    faults = [text for save_of in unread.values() for text in save_of]
    unsure: list[str] = []
    for one in sorted(files) if save is None else [save]:
        made = rebuilt(files[one])
        made.faults += unread.get(one, [])
        known = _known(target, paths, one, like)
        if known is not None:
            # Files that the save borrowed lie there under the save that wrote them.
            lacking = _lacking(known[0], [file for those in files.values() for file in those])
            faults += [f"save {one}: {path} is missing or has another header" for path in lacking]
            whole += [] if lacking else [(known[0], known[1], [])]
            continue
        faults += [f"save {one}: {fault}" for fault in made.faults if fault not in faults]
        if not made.faults and like is not None:
            lacking = sorted(set(like.tensors) - set(made.tensors))
            faults += [f"save {one}: {name}{IN_NO_FILE}" for name in lacking]
            made.faults += lacking
        if made.faults:
            continue
        if like is None and save is None:
            unsure += [f"save {one}: section {text}" for text in made.unsure]
        whole.append((_from_headers(target, one, made, like, step), "headers", _losses(made, like)))
    exact = [one for one in whole if one[1] != "headers"]
    whole = exact or whole
    if not whole:
        raise Damaged("\n".join([f"{target} cannot be rescued, no save in it is whole:", *faults]))
    if len(whole) > 1 or (whole[0][1] == "headers" and like is None and save is None and len(files) > 1):
        raise Mismatch(
            f"{target} has files of saves {', '.join(sorted(files))}, of which one may have borrowed from another, and "
            "its manifest alone said what: name a copy of it with like=. If none has borrowed, name a step of the same "
            "run with like=, or the save with save="
        )
    if unsure and whole[0][1] == "headers":
        raise Mismatch(
            f"{target}: {'; '.join(unsure)}. They may have had none, or it is lost: name a step of the same run with "
            f"like=, which shows it, or take what is there with save={whole[0][0].save!r}"
        )
    return whole[0]


def _data_files(target: Place, paths: list[str]) -> tuple[dict[str, list[DataFile]], dict[str, list[str]]]:
    """The data files in a folder by their saves; and the faults of those whose headers cannot be read."""
    readable: dict[str, list[DataFile]] = {}
    unread: dict[str, list[str]] = {}
    for path in paths:
        save = datafile.save_of(path)
        if save is None:
            continue
        try:
            first, nbytes = (target / path).read_start(8)
            data, _ = (target / path).read_start(datafile.header_length(first, nbytes))
            record = FileRecord(path, nbytes, len(data), blocks.digest(data))
            one = described(record, datafile.parse_header(data, nbytes))
            readable.setdefault(save, []).append(one)
        except FileNotFoundError:
            unread.setdefault(save, []).append(f"{target / path} is a link to nothing, or was deleted meanwhile")
        except ValueError as error:
            unread.setdefault(save, []).append(f"{target / path} cannot be used: {error}")
    return readable, unread


def _known(
    target: Place, paths: list[str], save: str, like: Manifest | None
) -> tuple[Manifest, Literal["parts", "copy"]] | None:
    """The manifest of that very save, as its first rank left it or a copy has it; sizes and digests may lack."""
    if like is not None and like.save == save:
        return self_contained(like), "copy"
    own = part.file_name(0, save)
    if own not in paths:
        return None
    try:
        left = part.decode((target / own).read_small(), str(target / own)).manifest
    except Damaged as error:
        log.warning("%s", error)
        return None
    return None if left is None else (_filled(target, left), "parts")


def _filled(target: Place, drafted: Manifest) -> Manifest:
    rows = []
    for file in drafted.data_files:
        try:
            first, nbytes = (target / file.path).read_start(8)
            data, _ = (target / file.path).read_start(datafile.header_length(first, nbytes))
            file = FileRecord(file.path, nbytes, len(data), blocks.digest(data))
        except (FileNotFoundError, ValueError) as error:  # reported as missing
            log.debug("%s: %s", target / file.path, error)
        rows.append(manifest.file_row(file))
    return msgspec.structs.replace(drafted, files=rows)


def _lacking(record: Manifest, files: list[DataFile]) -> list[str]:
    present = {file.record[:4] for file in files}
    return [file.path for file in record.data_files if file[:4] not in present]


def _from_headers(
    target: Place, save: str, made: Rebuilt, like: Manifest | None, step: int | None
) -> Manifest:  # fmt: skip
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    order = {} if like is None else {name: at for at, name in enumerate(like.tensors)}
    number = re.fullmatch(r"step\D*(\d+)", target.name)
    if like is not None:
        _refuse_others(made, like)
    record = Manifest(
        save=save,
        run=secrets.token_hex(8) if like is None else like.run,
        step=int(number[1]) if step is None and number is not None else step,
        created=now,
        producer={
            "holdfast": __version__,
            "torch": str(torch.__version__),
            "python": python_version(),
            RESCUED: f"{now} from headers, {'without values' if like is None else f'values of save {like.save}'}",
        },
        world_size=made.world_size,
        files=[manifest.file_row(file) for file in made.files],
        tensors=dict(sorted(made.tensors.items(), key=lambda item: order.get(item[0], len(order)))),
        values={} if like is None else like.values,
        containers={} if like is None else like.containers,
        aliases={} if like is None else {a: n for a, n in like.aliases.items() if n in made.tensors},
        per_rank=made.per_rank,
        attachments=_attachments(target, save),
    )
    return manifest.versioned(record, least=manifest.VERSION if like is None else like.version)


def _refuse_others(made: Rebuilt, like: Manifest) -> None:
    unlike = [
        f"{name} is {ours.dtype} {list(ours.shape)} here and {theirs.dtype} {list(theirs.shape)} there"
        for name, ours in made.tensors.items()
        if (theirs := like.tensors.get(name)) is not None and (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape)
    ]
    if unlike:
        raise Mismatch("\n".join(["the neighbour named by like= is of another model:", *unlike]))


def _losses(made: Rebuilt, like: Manifest | None) -> list[str]:
    if like is None:
        return [
            "values, tied names, lists and tuples are lost, and so is the id of the run",
            "without like= nobody knows whether a whole section is missing",
            *(f"section {text}" for text in made.unsure),
        ]
    losses = [
        f"values, tied names, lists and tuples are those of step {like.step} (save {like.save}), not its own",
        "attached files are taken as they lie",
    ]
    if "step" in like.values:
        losses.insert(1, f"state['step'] is {like.values['step']} too: set it to the step of this save after a load")
    losses += [f"the value of each rank {path} is lost" for path in like.per_rank if path not in made.per_rank]
    more = [name for name in made.tensors if name not in like.tensors and name not in like.aliases]
    losses += [f"{name} is not in the neighbour" for name in more]
    return losses


def _attachments(target: Place, save: str) -> list[tuple[str, int, str]]:
    attachments, home = [], LinkCheck(target)
    for path in target.files_below():
        above, _, rest = path.partition("/")
        other = re.fullmatch(r"[0-9a-f]{16}", rest.partition("/")[0]) is not None and not rest.startswith(f"{save}/")
        if above == "attachments" and not other and not names.split(path)[-1].startswith("."):
            try:
                data = home.path(path).read_small()
                attachments.append((path, len(data), blocks.digest(data)))
            except (Damaged, FileNotFoundError) as error:  # a link, to elsewhere or to nothing
                log.warning("the attached file %s is left out: %s", target / path, error)
    return attachments
