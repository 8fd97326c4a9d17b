"""The page of a checkpoint: its tensors, values, files, and a quick check of its health and signature."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError, Untrusted
from holdfast.inspect.origins import origins_of
from holdfast.inspect.statistics import Statistics, statistics, statistics_of_all
from holdfast.ondisk import signature, spans
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.containers import as_text
from holdfast.ondisk.patterns import TENSOR, Patterns, selector
from holdfast.ondisk.version import __version__
from holdfast.policies.signing.keys import found_signature
from holdfast.read.damage import Verified
from holdfast.view.page import page
from holdfast.view.traces import Timeline

SCRIPTS = (
    "table.js", "chart.js", "treemap.js", "heatmap.js", "norms.js", "shards.js", "timeline.js", "tensor.js",
    "checkpoint.js",
)  # fmt: skip
BINS = 60
LONG = 400
"""Characters of a value that are shown."""

RANKS, READS = 16, 64
"""Of how many ranks a value that differs by rank is shown, and how many such values are read at all."""

_RANK = re.compile(r"(?:.*/)?[^/]+/(\d{5,})-of-\d{5,}(?:\.[1-9]\d*)?\.[0-9a-f]{16}\.safetensors")


def checkpoint_page(
    checkpoint: Checkpoint, *, stats: Patterns | None = None, timeline: Timeline | None = None,
    look: bool | None = None, served: bool = False,
) -> str:  # fmt: skip
    """The page as one HTML document.

    ``stats``: tensors of these names are read, and their statistics are in the page. ``served``: the page asks its
    server for them instead. ``look``: as in `health_of`. Raises what reading raises.
    """
    data = contents(checkpoint, look=look)
    data |= {"served": served, "timeline": timeline}
    if stats is not None:
        data["statistics"] = {
            one.name: one for one in statistics_of_all(checkpoint, _named(checkpoint, stats), bins=BINS)
        }
    return page(f"{_title(checkpoint)} · holdfast", SCRIPTS, data, served=served)


def contents(checkpoint: Checkpoint, *, look: bool | None = None) -> dict[str, Any]:
    """What the page shows, but for statistics and a timeline."""
    record = checkpoint.manifest
    ours = checkpoint.format == "holdfast"
    return {
        "kind": "checkpoint",
        "title": _title(checkpoint),
        "path": str(checkpoint.path),
        "quoted": shlex.quote(str(checkpoint.path)),
        "by": __version__,
        "format": checkpoint.format,
        "reading": checkpoint.reading,
        "step": checkpoint.step,
        "run": record.run,
        "save": record.save,
        "created": record.created,
        "producer": record.producer,
        "ranks": checkpoint.world_size,
        "health": health_of(checkpoint, look=look),
        "signature": signature_of(checkpoint),
        "files": [[f.path, f.bytes, _rank_of(f.path) if ours else None] for f in record.data_files],
        "tensors": [_row(checkpoint, name, tensor) for name, tensor in record.tensors.items()],
        "aliases": record.aliases,
        "values": [[path, _short(checkpoint.value(path))] for path in record.values],
        "perRank": _per_rank(checkpoint),
        "attachments": checkpoint.attachments,
        "leftOut": checkpoint.left_out,
    }


def figures(checkpoint: Checkpoint, name: str) -> Statistics:
    """The statistics that a page shows of one tensor. Raises KeyError for an unknown name, Damaged, StorageError."""
    return statistics(checkpoint, name, bins=BINS)


def _named(checkpoint: Checkpoint, patterns: Patterns) -> list[str]:
    wanted = selector(patterns, checkpoint.records, checkpoint.path, said="", what=TENSOR)
    return list(filter(wanted, checkpoint.records))


def _title(checkpoint: Checkpoint) -> str:
    return str(checkpoint.path).rstrip("/").rpartition("/")[2] or str(checkpoint.path)


def _row(checkpoint: Checkpoint, name: str, tensor: TensorRecord) -> list[Any]:
    """What the page has of a tensor; under a map, also the saved tensors that it comes from."""
    row = [name, tensor.dtype, tensor.shape, tensor.nbytes, msgspec.to_builtins(tensor.cells), tensor.files]
    if checkpoint.remap is None:
        return row
    if checkpoint.files.is_made(checkpoint.saved_name(name)):
        row[4:] = {"boxes": []}, ""  # no file holds it
    return [*row, origins_of(checkpoint, name)]


def _rank_of(path: str) -> int | None:
    match = _RANK.fullmatch(path)
    return int(match[1]) if match else None


def _short(value: object) -> tuple[str, str]:
    """How a value looks, and of which type it is."""
    text = as_text(value) if not isinstance(value, str) else value
    shown = f"{text[:LONG]}…" if len(text) > LONG else text
    return shown.encode("utf-8", "replace").decode(), type(value).__name__


def _per_rank(checkpoint: Checkpoint) -> list[list[Any]]:
    """[path, ranks, the first of their values]: each is a small read, and together they are few."""
    paths = checkpoint.differing
    each = max(1, min(RANKS, checkpoint.world_size, READS // max(1, len(paths))))
    few = [(path, rank) for path in paths[: READS // each] for rank in range(each)]
    with ThreadPoolExecutor(16, thread_name_prefix="holdfast-view") as pool:
        shown = dict(zip(few, pool.map(lambda one: _of_rank(checkpoint, *one), few), strict=True))
    return [
        [path, _ranks(checkpoint, path), [shown[path, rank] for rank in range(each) if (path, rank) in shown]]
        for path in paths
    ]


def _of_rank(checkpoint: Checkpoint, path: str, rank: int) -> tuple[str, str]:
    try:
        return _short(checkpoint.per_rank(path, rank))
    except (HoldfastError, LookupError) as error:  # a page of what is broken is of most use
        return f"cannot be read: {str(error)[:LONG]}", "error"


def _ranks(checkpoint: Checkpoint, path: str) -> int:
    text = checkpoint.manifest.per_rank[path]
    return spans.read(text).count if text else checkpoint.world_size


ASKED = 256
"""Files of a checkpoint in a store whose headers are read by default; of a local one all are."""

FAULTS, FEW = 100, 3
"""Faults that a page lists, and what each of them hits that is named."""


@dataclass(frozen=True)
class Health:
    """``kind``: "good", "bad" or "" (not looked at). ``faults``: what is damaged, in words."""

    kind: str
    words: str
    note: str
    faults: tuple[str, ...] = ()
    hit: tuple[str, ...] = ()


def health_of(checkpoint: Checkpoint, *, look: bool | None = None) -> Health:
    """Headers, sizes and attachments, looked at; ``look=None``: unless that would be many requests to a store."""
    if checkpoint.format != "holdfast":
        return Health("", "not checked", "the format keeps no sums")
    files = len(checkpoint.manifest.files)
    if look is None:
        look = not checkpoint.path.is_remote or files <= ASKED
    if not look:
        return Health("", "not checked", f"{files} headers were not asked for")
    verified = checkpoint.verify(deep=False, raises=False)
    if verified.whole:
        return Health("good", "whole", "by sizes and headers")
    hit = len(verified.tensors)
    return Health(
        "bad", "damaged", f"{hit} tensor{'s are' if hit != 1 else ' is'} hit", _faults(verified), verified.tensors
    )


def _faults(verified: Verified) -> tuple[str, ...]:
    """Each fault once, with what it hits: a file that is cut hits thousands of tensors in one and the same way."""
    faults: dict[tuple[str, str], list[str]] = {}
    for damage in verified.damages:
        faults.setdefault((damage.file, damage.what), []).append(str(damage))
    return tuple(
        f"{', '.join(hit[:FEW])}{f' and {len(hit) - FEW} more' if len(hit) > FEW else ''}: {what}"
        for (_, what), hit in [*faults.items()][:FAULTS]
    )


def signature_of(checkpoint: Checkpoint) -> tuple[str, str, str, str]:
    """(kind, words, note, key): whether there is a signature, and whether somebody who is trusted made it."""
    if checkpoint.signed_by is not None:
        return "good", "signed", f"by the key {checkpoint.signed_by[:8]}…", checkpoint.signed_by
    if checkpoint.format != "holdfast":
        return "", "not signed", "this format has none", ""
    for key in _keys(checkpoint):
        return "warn", "signed, not checked", "--require KEY checks it", key
    return "", "not signed", "", ""


def _keys(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        data = found_signature(checkpoint.path, checkpoint.manifest)
        if data is not None:
            yield signature.decode(data, str(checkpoint.path))[0].key
    except (Untrusted, HoldfastError):  # what cannot be read signs nothing
        return
