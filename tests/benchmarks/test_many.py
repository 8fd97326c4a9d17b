"""The benchmark of many small tensors judges every way that is set beside safetensors, and writes its judgement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import many


def test_a_way_that_takes_five_times_as_long_misses_its_bar() -> None:
    rows = many.Rows()
    for what, seconds, beside in (
        (many.THEIR_LOAD, [1.0, 2.0, 3.0], None),
        ("load, flat dict", [2.0, 8.0, 20.0], many.THEIR_LOAD),
        ("load, nested dict", [10.0, 10.0, 1.0], many.THEIR_LOAD),
        ("Saver.save", [100.0], None),
    ):
        rows.found[what] = row = many.Row(what, 1000, beside)
        row.seconds.extend(seconds)
    judged = [(bar.what.partition(", times")[0], bar.measured, bar.met) for bar in many.bars_of(rows)]
    assert judged == [("load, flat dict", 4.0, True), ("load, nested dict", 5.0, False)]


def test_the_bars_are_written_with_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("QUICK", 100), ("FOREIGN", 1000), ("PARAMETERS", 100)):
        monkeypatch.setattr(many, name, count)
    out = tmp_path / "many.json"
    monkeypatch.setattr("sys.argv", ["many", "--quick", "--dir", str(tmp_path / "work"), "--out", str(out)])
    assert many.main() == 0
    written = json.loads(out.read_text())
    beside = [row["what"] for row in written["rows"] if row["beside"]]
    assert len(beside) == 6 and [bar["what"].partition(", times")[0] for bar in written["bars"]] == beside
