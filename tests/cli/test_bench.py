"""The benchmark: what it says, that it leaves nothing, and its advice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import typer

from holdfast.cli.doctor import _ended_gently
from holdfast.cli.errors import Code
from holdfast.cli.options import bytes_of, seconds_of
from holdfast.doctor import bench as benching
from holdfast.run.interval import advise
from tests.cli.conftest import Run
from tests.servers import Server
from tests.stores import bucket_of


@pytest.mark.slow
def test_a_folder(tmp_path: Path, run: Run) -> None:
    code, out, _ = run(
        "doctor", tmp_path / "a" / "b", "--bench", "--size", "20MB", "--state-size", "2GB", "--mtbf", "8h", "--json"
    )
    told = json.loads(out)
    assert code == Code.FINE and not list(tmp_path.iterdir())
    assert [row["what"] for row in told["rows"]] == ["raw write", "raw read", "small files", "save", "load"]
    assert all(row["rate"] > 0 for row in told["rows"]) and told["nbytes"] == 16 << 20
    save = next(row for row in told["rows"] if row["what"] == "save")
    stall = told["stall"] * 2e9 / told["nbytes"]
    expected = advise(8 * 3600.0, stall=stall, save=2e9 / save["rate"], step=1.0)
    assert told["advice"]["seconds"] == pytest.approx(expected.seconds)
    code, out, _ = run("doctor", tmp_path, "--bench", "--size", "8MB", "--step-time", "2s")
    assert code == Code.FINE and "save every" in out and "steps)" in out and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_store(moto: Server) -> None:
    with bucket_of(moto) as bucket:
        done = benching.bench(bucket.at("bench"), 8 << 20, rounds=1)
        assert len(done.rows) == 5 and not bucket.files() and not bucket.uploads()


def test_what_is_too_large_is_refused_before(tmp_path: Path, run: Run) -> None:
    code, _, err = run("doctor", tmp_path / "b", "--bench", "--size", "900TB")
    assert code == Code.STORAGE and "--size" in err and not list(tmp_path.iterdir())


def test_sizes_and_times() -> None:
    assert [bytes_of(text) for text in ("7", "5GB", "512 MiB", "1.5k", "2t")] == [
        7,
        5 * 10**9,
        512 << 20,
        1500,
        2 * 10**12,
    ]
    assert [seconds_of(text) for text in ("90", "30m", "8h", "1.5d")] == [90, 1800, 28800, 129600]
    for text in ("", "GB", "-1", "5 apples", "0"):
        with pytest.raises(typer.BadParameter):
            bytes_of(text)
        with pytest.raises(typer.BadParameter):
            seconds_of(text)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ended_gently():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
