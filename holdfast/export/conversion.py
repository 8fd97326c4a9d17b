"""The story of one conversion: lay the target out, copy through windows on every rank, put it in its place.

`convert` and `merge` call `run`. It knows neither a format nor a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import torch

from holdfast import events
from holdfast.export.partial import Partial
from holdfast.export.to_store import check_free, check_one_machine, grown_at, upload
from holdfast.export.work import Converted, ConvertWork, Options
from holdfast.ranks.ranks import Call, Ranks, ranks_of
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.layers import with_deadline

Begin = Callable[[Call, Place, Options, Ranks, Partial], ConvertWork]
"""Makes one rank's work: of the call, the target, the options, the ranks, and the folder where the target grows."""


def run(
    begin: Begin, target: Place, options: Options, *, group: torch.distributed.ProcessGroup | None, deadline: float
) -> Converted:
    """Make ``target`` on all ranks of ``group``."""
    ranks, began = ranks_of(group), monotonic()
    place = with_deadline(target, deadline)
    grown = grown_at(place) if place.is_remote else LocalPlace(place)
    options, overwrite = replace(options, overwrite=options.overwrite or grown != place), options.overwrite
    partial = Partial(grown)
    with ranks.call(f"convert to {place} ({options.to})", deadline=deadline) as call:
        if place.is_remote:
            call.exchange("look", lambda: _look(as_store(place), ranks, overwrite=overwrite), check_one_machine, str)
        work = begin(call, place, options, ranks, partial)
        try:
            done = call.exchange("plan", work.plan, work.begin, str)
            work.converted.nbytes = call.settle("copy", lambda: work.copy(done), work.finish, int)
            if place.is_remote:  # still locked: a second call would upload its files among these

                def send() -> int:
                    return upload(grown, as_store(place)) if ranks.first else 0

                call.settle("upload", send, lambda nbytes: sum(nbytes), int)
        finally:
            partial.leave()
            if place.is_remote and ranks.first:
                grown.parent.delete_if_empty()
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
        # A Hugging Face folder is for the model alone: nobody is surprised that the optimizer is not there.
        events.log.log(
            logging.INFO if converted.to == "huggingface" else logging.WARNING,
            "%s leaves out %d names for which the format %r has no place (%s%s); Converted.left_out lists them",
            converted.path, len(lost), converted.to, ", ".join(lost[:3]), ", …" if len(lost) > 3 else "",
        )  # fmt: skip
    if converted.lacks_config:
        events.log.warning(
            "%s has no config.json, without which from_pretrained loads nothing: convert with extras= (a folder with "
            "config and tokenizer, the base model's say), or call save_pretrained of both with this folder",
            converted.path,
        )
