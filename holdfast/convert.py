"""Converts a checkpoint to another format: open, select, lay the target out, copy through windows, put it in place.

Users call `convert`. Never holds more than a few windows of the state, and never shows a target that is not whole.
"""

from __future__ import annotations

import os
from dataclasses import replace
from time import monotonic

import torch

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.export.huggingface import Extras
from holdfast.export.partial import Partial
from holdfast.export.to_store import check_free, check_one_machine, grown_at, upload
from holdfast.export.work import Converted, ConvertWork, Options, To
from holdfast.ondisk.patterns import Patterns, Rename
from holdfast.ranks.ranks import DEADLINE, Ranks, ranks_of
from holdfast.read.ranges import Verify
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

MAX_SHARD_BYTES = 5_000_000_000


def convert(
    source: str | os.PathLike[str] | Place | Checkpoint, target: str | os.PathLike[str] | Place, *,
    to: To = "holdfast",
    only: Patterns = "*", rename: Rename | None = None, dtype: torch.dtype | None = None, step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES, extras: Extras | None = None, overwrite: bool = False,
    verify: Verify = True, group: torch.distributed.ProcessGroup | None = None, deadline: float = DEADLINE,
) -> Converted:  # fmt: skip
    """Write the checkpoint ``source``, ours or foreign, to ``target`` in another format, tensor by tensor.

    Called by every rank of ``group`` with the same arguments; each copies its share, and the bytes of the result do not
    depend on how many there are. ``to``: ``"holdfast"`` (a folder), ``"huggingface"`` (a folder with the model's
    tensors), ``"torch"`` (a file for `torch.load`), ``"dcp"`` (a folder for `torch.distributed.checkpoint`).

    ``only``: what to take, by the source's names, before ``rename``: a name, a path above names, a pattern, or several,
    each of which must fit something. ``rename``: the source's names to others: a table of names or leading paths (an
    empty new one drops it), each of which must be there, or a function; for a Hugging Face target the source's names
    are bare, without ``model/`` and with points. ``dtype``: what floating tensors become. ``step``: noted instead of
    the source's, in our own format. ``max_shard_bytes``: of tensors in one file; a target other than ``"torch"`` has as
    many files as it needs. ``extras``: files to put beside a Hugging Face model, its config.json and tokenizer, which
    `from_pretrained` needs: paths, a folder (all in it but weights), or names with paths or bytes. ``overwrite``
    replaces a target that exists, once the new one is whole. ``verify`` as in `holdfast.load`.

    A ``target`` in a store grows in the temporary folder of the machine (``TMPDIR``), which needs room for all of it,
    and is uploaded when it is whole, the file that makes it a checkpoint last; its ranks run on one machine.

    Killed or failed, it leaves nothing under the target's name; the same call then goes on from ``<target>.partial``.
    Host memory stays below 512 MiB a rank, whatever the size. Raises on every rank the same: NotACheckpoint, Mismatch,
    Unsupported, Damaged, StorageError, RankLost.
    """
    options = Options(to, only, rename, dtype, step, max_shard_bytes, extras, overwrite, verify)
    options.check()
    if to == "huggingface" and str(target).partition("?")[0].endswith(".safetensors"):
        folder = str(target).partition("?")[0].removesuffix(".safetensors")
        raise ValueError(
            f"{target} is called like a file, and a Hugging Face model is a folder: give {folder}, and its weights "
            f"are in {folder}/model.safetensors"
        )
    ranks, began = ranks_of(group), monotonic()
    place = with_deadline(location(target), deadline)
    grown = grown_at(place) if place.is_remote else LocalPlace(place)
    work = ConvertWork(source, place, replace(options, overwrite=overwrite or grown != place), ranks, Partial(grown))
    with ranks.call(f"convert to {place} ({to})", deadline=deadline) as call:
        if place.is_remote:
            call.exchange("look", lambda: _look(as_store(place), ranks, overwrite=overwrite), check_one_machine, str)
        try:
            done = call.exchange("plan", work.plan, work.begin, str)
            work.converted.nbytes = call.settle("copy", lambda: work.copy(done), work.finish, int)
        finally:
            work.partial.leave()
        if place.is_remote:

            def send() -> int:
                return upload(grown, as_store(place)) if ranks.first else 0

            call.settle("upload", send, lambda nbytes: sum(nbytes), int)
    work.converted.seconds = monotonic() - began
    if ranks.first:
        _warn(work.converted)
    return work.converted


def _look(place: StorePlace, ranks: Ranks, *, overwrite: bool) -> str:
    """The name of this machine, once it is known that the target may be there."""
    if ranks.first:
        check_free(place, overwrite=overwrite)
    return ranks.host


def _warn(converted: Converted) -> None:
    lost = converted.left_out
    if lost:
        events.log.warning(
            "%s leaves out %d names for which the format %r has no place (%s%s); Converted.left_out lists them",
            converted.path, len(lost), converted.to, ", ".join(lost[:3]), ", …" if len(lost) > 3 else "",
        )  # fmt: skip
    if converted.lacks_config:
        events.log.warning(
            "%s has no config.json, without which from_pretrained loads nothing: convert with extras= (a folder with "
            "config and tokenizer, the base model's say), or call save_pretrained of both with this folder",
            converted.path,
        )
