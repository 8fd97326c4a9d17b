"""A timeline as lanes of a page, from what `timeline` wrote or any Chrome trace; the trace may be hostile."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import NotACheckpoint, StorageError
from holdfast.report.recording import SUFFIX
from holdfast.report.timeline import merge
from holdfast.storage.local.local_place import LocalPlace

SPANS = 40_000
"""How many a page holds; of more, the longest are kept."""

LARGEST = 256 << 20
"""Bytes of one trace, unpacked."""


@dataclass(frozen=True)
class Timeline:
    """``lanes``: [process, thread] as the trace calls them, in order. ``spans``: [lane, name, begin, length, detail]
    with ``name`` a place in ``names``, times in seconds from the first on; ``dropped`` short ones are left out.
    ``window``: the time of the spans about the page's own checkpoint, if there are any."""

    lanes: list[tuple[str, str]]
    names: list[str]
    spans: list[tuple[int, int, float, float, str]]
    dropped: int
    window: tuple[float, float] | None = None


def read_timeline(path: LocalPlace, *, of: str = "") -> Timeline:
    """The timelines below a folder joined on one clock, the trace in one file, or the traces of a folder.

    ``of``: the name of the folder of the checkpoint that the page is about; the page shows its spans first.
    Raises NotACheckpoint if there is neither, StorageError if it cannot be read.
    """
    names = path.files_below()
    if any(name.endswith(SUFFIX) for name in names):
        return _joined(merge(path).events, of)
    traces = [path / name for name in names if name.endswith((".json", ".json.gz"))]
    events = [event for one in traces or ([path] if path.is_file() else []) for event in _events(one)]
    if not events:
        raise NotACheckpoint(
            f"there is no timeline at {path}: give a folder that HOLDFAST_TIMELINE (or the function timeline) "
            "has filled, or a Chrome trace"
        )
    return _joined(events, of)


def _events(path: LocalPlace) -> list[dict[str, Any]]:
    try:
        data, size = path.read_start(LARGEST + 1)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(31).decompress(data, LARGEST + 1)
        if max(size, len(data)) > LARGEST:
            raise StorageError(f"{path} holds more than {LARGEST >> 20} MiB: view a part of it")
        trace = msgspec.json.decode(data)
    except FileNotFoundError:
        raise NotACheckpoint(f"there is no {path}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError, zlib.error) as error:
        raise NotACheckpoint(f"{path} is no trace: {error}") from None
    rows = trace.get("traceEvents") if isinstance(trace, dict) else trace
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _joined(events: Iterable[Mapping[str, Any]], of: str) -> Timeline:
    processes: dict[str, str] = {}
    threads: dict[tuple[str, str], str] = {}
    order: dict[str, float] = {}
    spans: list[tuple[tuple[str, str], str, float, float, str]] = []
    about: list[float] = []
    for event in events:
        kind, process, thread = event.get("ph"), str(event.get("pid", "")), str(event.get("tid", ""))
        given = event.get("args")
        arguments: dict[str, Any] = given if isinstance(given, dict) else {}
        if kind == "M":
            label = str(arguments.get("name", ""))
            if event.get("name") == "process_name":
                processes[process] = label
            elif event.get("name") == "thread_name":
                threads[process, thread] = label
            elif event.get("name") == "process_sort_index":
                order[process] = _number(arguments.get("sort_index")) or 0.0
            continue
        at, lane, name = _number(event.get("ts")), (process, thread), str(event.get("name", ""))
        if at is None or kind != "X":
            continue
        long = max(0.0, _number(event.get("dur")) or 0.0)
        spans.append((lane, name, at, long, _detail(arguments)))
        if of and str(arguments.get("path", "")).rstrip("/").rpartition("/")[2] == of:
            about += (at, at + long)
    kept = sorted(spans, key=lambda span: -span[3])[:SPANS]
    kept.sort(key=lambda span: span[2])
    first = min((span[2] for span in kept), default=0.0)
    lanes = sorted({span[0] for span in kept}, key=lambda lane: (order.get(lane[0], 0.0), _natural(lane)))
    number = {lane: i for i, lane in enumerate(lanes)}
    names = {name: i for i, name in enumerate(dict.fromkeys(span[1] for span in kept))}
    shown = [
        (number[lane], names[name], (at - first) / 1e6, long / 1e6, detail) for lane, name, at, long, detail in kept
    ]
    labels = [(processes.get(p) or f"process {p}", threads.get((p, t)) or t) for p, t in lanes]
    window = ((min(about) - first) / 1e6, (max(about) - first) / 1e6) if about else None
    return Timeline(labels, list(names), shown, len(spans) - len(kept), window)


def _natural(lane: tuple[str, str]) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() and len(part) < 18 else (1, 0, part) for part in lane]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _detail(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in list(arguments.items())[:8])[:300]
