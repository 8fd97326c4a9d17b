"""OpenTelemetry: saves and loads as spans with their phases, and metrics of them. Call `install`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast import events
from holdfast.errors import Unsupported
from holdfast.ondisk.version import __version__
from holdfast.run.tiers import uploader

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

STALLS = {"call", "slot wait", "hook wait"}
"""Spans of a background save during which training waits."""

WAITED_FOR = {"save", "load", "prepare"}
"""Whole spans that training waits for from end to end."""

EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds between which durations are counted."""


class Telemetry:
    """What `install` has installed; `uninstall` takes it back."""

    def __init__(self, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        from opentelemetry import metrics, trace

        self._api, self._observation = trace, metrics.Observation
        self._tracer = trace.get_tracer("holdfast", __version__, tracers)
        meter = metrics.get_meter("holdfast", __version__, meters)
        edges = {"explicit_bucket_boundaries_advisory": list(EDGES)}
        self._bytes = meter.create_counter("holdfast.io", "By", "Bytes that were saved, loaded, copied, verified, …")
        self._seconds = meter.create_histogram("holdfast.duration", "s", "From the call to the outcome.", **edges)
        self._phases = meter.create_histogram("holdfast.phase.duration", "s", "Of one phase.", **edges)
        self._stall = meter.create_histogram("holdfast.stall.duration", "s", "What training waited, at once.", **edges)
        self._failures = meter.create_counter("holdfast.failures", "{failure}", "Saves, loads and others that failed.")
        meter.create_observable_up_down_counter(
            "holdfast.saves.active", [self._active], "{save}", "Background saves that are under way."
        )
        meter.create_observable_up_down_counter(
            "holdfast.uploads.backlog", [_backlog], "{step}", "Steps of the fast tier that the store still lacks."
        )
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._lock, self._saves = threading.Lock(), 0
        self._open: dict[int, Any] = {}  # by number: spans under way
        self._wholes: dict[str, tuple[int, Any]] = {}  # by path: the save or load under way, whose phases these are
        events.observe(self._see)

    def uninstall(self) -> None:
        """Tell of nothing any more. Idempotent."""
        events.ignore(self._see)

    def _see(self, span: events.Span) -> None:
        if span.rank < 0:  # single files: many, and no phase
            return
        self._end(span) if span.ended else self._begin(span)

    def _begin(self, span: events.Span) -> None:
        of = self._wholes.get(span.path)
        # A save or load belongs to whatever the caller traces, a phase to its save, whichever thread it is in.
        context = None if span.whole or of is None else self._api.set_span_in_context(of[1])
        began = self._tracer.start_span(
            f"holdfast.{_name(span)}", context, start_time=self._at(span.began), attributes=_attributes(span)
        )
        with self._lock:
            self._saves += span.name == events.BACKGROUND
            self._open[span.number] = began
            if span.whole:
                self._wholes[span.path] = span.number, began

    def _end(self, span: events.Span) -> None:
        with self._lock:
            begun = self._open.pop(span.number, None)
            if span.whole and self._wholes.get(span.path, (0, None))[0] == span.number:
                del self._wholes[span.path]
            self._saves -= begun is not None and span.name == events.BACKGROUND
        if begun is None:  # it began before this was installed
            return
        if span.nbytes:
            begun.set_attribute("holdfast.bytes", span.nbytes)
        if span.error:
            begun.set_status(self._api.Status(self._api.StatusCode.ERROR, span.error))
        begun.end(self._at(span.ended))
        self._count(span)

    def _count(self, span: events.Span) -> None:
        attributes: dict[str, str | bool] = {"holdfast.operation": _name(span)}
        if span.whole:
            self._seconds.record(span.seconds, attributes)
            if span.nbytes:
                self._bytes.add(span.nbytes, attributes)
            if span.error:
                self._failures.add(1, {**attributes, "error.type": span.error.partition(":")[0]})
        else:
            self._phases.record(span.seconds, {"holdfast.phase": span.name})
        if span.name in STALLS or (span.whole and span.name in WAITED_FOR):
            self._stall.record(span.seconds, {"holdfast.cause": span.name})

    def _at(self, moment: float) -> int:
        return int(moment * 1e9) + self._epoch

    def _active(self, _: CallbackOptions) -> Iterable[Observation]:
        return [self._observation(self._saves)]


def install(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> Telemetry:
    """Report this process's saves, loads, copies, … to OpenTelemetry from now on.

    Without providers the global ones are used. Each save or load is a span, child of the caller's own, and the parent
    of its phases; metrics are listed in docs/observe.md. Returns what takes it back. Raises Unsupported if
    OpenTelemetry is not installed.
    """
    try:
        return Telemetry(tracer_provider, meter_provider)
    except ImportError as error:
        raise Unsupported(f"OpenTelemetry is not installed ({error}): pip install 'holdfast-torch[otel]'") from error


def _name(span: events.Span) -> str:
    return "save" if span.name == events.BACKGROUND else span.name.replace(" ", "_")


def _attributes(span: events.Span) -> dict[str, Any]:
    attributes: dict[str, Any] = {"holdfast.path": span.path, "holdfast.rank": span.rank, "thread.name": span.lane}
    if span.whole:
        attributes["holdfast.background"] = span.name == events.BACKGROUND
    if span.step is not None:
        attributes["holdfast.step"] = span.step
    return attributes


def _backlog(_: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    return [Observation(sum(one.waiting for one in uploader.running()))]
