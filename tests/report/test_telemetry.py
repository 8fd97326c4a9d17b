"""OpenTelemetry's own spans and metrics of real saves and loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import holdfast
from holdfast.report import telemetry
from holdfast.testing import faults


class Told:
    """What the exporters were told."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._metrics])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def children(self, of: ReadableSpan) -> dict[str, ReadableSpan]:
        return {s.name: s for s in self.spans if s.parent is not None and s.parent.span_id == of.context.span_id}

    def points(self, name: str) -> list[Any]:
        data = self._metrics.get_metrics_data()
        found = [metric for resource in data.resource_metrics for scope in resource.scope_metrics
                 for metric in scope.metrics if metric.name == name]  # fmt: skip
        return [point for metric in found for point in metric.data.data_points]

    def units(self) -> dict[str, str]:
        data = self._metrics.get_metrics_data()
        return {m.name: m.unit for r in data.resource_metrics for scope in r.scope_metrics for m in scope.metrics}


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    installed = telemetry.install(made.tracers, made.meters)
    yield made
    installed.uninstall()


def _state() -> dict[str, Any]:
    model = torch.nn.Linear(100, 100)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 3}


def test_a_save_is_a_span_of_the_callers_and_its_phases_are_its_children(told: Told, tmp_path: Path) -> None:
    with told.tracers.get_tracer("training").start_as_current_span("epoch") as epoch:
        holdfast.save(_state(), tmp_path / "a")
        holdfast.load(tmp_path / "a", _state())
    save, load = told.one("holdfast.save"), told.one("holdfast.load")
    assert save.parent.span_id == load.parent.span_id == epoch.get_span_context().span_id
    assert save.attributes["holdfast.step"] == 3 and save.attributes["holdfast.path"] == str(tmp_path / "a")
    assert save.attributes["holdfast.bytes"] > 40_000 and save.status.status_code is StatusCode.UNSET
    phases = told.children(save)
    assert set(phases) == {
        f"holdfast.{name}" for name in ("gather", "plan", "layout", "stage", "write", "durable", "settle", "commit")
    }
    assert all(save.start_time <= phase.start_time <= phase.end_time <= save.end_time for phase in phases.values())
    assert set(told.children(load)) >= {f"holdfast.{name}" for name in ("open", "match", "read", "fill", "settle")}
    told.tracers.force_flush()


def test_a_background_save_is_one_span_over_its_threads(told: Told, tmp_path: Path) -> None:
    under_way = []
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(_state(), tmp_path / "a")
        saving.add_done_callback(lambda _: under_way.append(told.points("holdfast.saves.active")[0].value))
        saving.wait()
    save = told.one("holdfast.save")
    phases = told.children(save)
    assert {"holdfast.call", "holdfast.stage", "holdfast.commit"} <= set(phases)
    assert phases["holdfast.call"].attributes["thread.name"] != phases["holdfast.stage"].attributes["thread.name"]
    assert save.attributes["holdfast.background"] is True
    assert told.points("holdfast.saves.active")[0].value == 0
    (stall,) = told.points("holdfast.stall.duration")
    assert stall.attributes == {"holdfast.cause": "call"} and stall.sum <= saving.timing.stall


def test_metrics(told: Told, tmp_path: Path) -> None:
    holdfast.save(_state(), tmp_path / "a")
    holdfast.tools.verify(tmp_path / "a")
    with faults("write", error="ENOSPC"), pytest.raises(holdfast.SaveFailed):
        holdfast.save(_state(), tmp_path / "b")
    by = {point.attributes["holdfast.operation"]: point for point in told.points("holdfast.duration")}
    assert by["save"].count == 2 and by["verify"].count == 1 and by["save"].sum > 0
    moved = {point.attributes["holdfast.operation"]: point.value for point in told.points("holdfast.io")}
    assert moved["save"] > 40_000 and moved["verify"] > 40_000
    (failures,) = told.points("holdfast.failures")
    assert failures.value == 1
    assert failures.attributes == {"holdfast.operation": "save", "error.type": "SaveFailed"}
    failed = next(s for s in told.spans if s.name == "holdfast.save" and s.status.status_code is StatusCode.ERROR)
    assert "No space left" in failed.status.description
    assert told.points("holdfast.uploads.backlog")[0].value == 0
    assert {p.attributes["holdfast.phase"] for p in told.points("holdfast.phase.duration")} >= {"plan", "commit"}
    assert told.units() == {
        "holdfast.io": "By", "holdfast.duration": "s", "holdfast.phase.duration": "s", "holdfast.stall.duration": "s",
        "holdfast.failures": "{failure}", "holdfast.saves.active": "{save}", "holdfast.uploads.backlog": "{step}",
    }  # fmt: skip


def test_uploads_of_tiers_are_told(told: Told, tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "store", fast=tmp_path / "fast", every=1) as manager:
        manager.step(1, {**_state(), "step": 1})
    uploads = [span for span in told.spans if span.name == "holdfast.upload"]
    assert uploads and uploads[0].attributes["holdfast.step"] == 1 and uploads[0].attributes["holdfast.bytes"] > 40_000


def test_it_can_be_taken_back(told: Told, tmp_path: Path) -> None:
    other = Told()
    installed = telemetry.install(other.tracers, other.meters)
    installed.uninstall()
    holdfast.save(_state(), tmp_path / "a")
    assert told.spans and not other.spans


@pytest.mark.slow
def test_nothing_of_it_is_imported_before() -> None:
    # Torch itself may bring it; what counts is that we add nothing, not even when the first event comes.
    code = (
        "import sys, torch; before = {*sys.modules}; import holdfast; from holdfast import events\n"
        "events.reached('gather', 'x', 0); print(*({*sys.modules} - before))"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = ("opentelemetry", "rich", "IPython", "holdfast.report.recording", "holdfast.report.trace")
    assert "holdfast.report.timeline" in added
    assert not [name for name in added if name.startswith(heavy)]
