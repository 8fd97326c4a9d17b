"""Options of the wrong type: the error names the option, what was given and what it takes, before anything happens."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
import holdfast.dcp

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep": 3}, TypeError, "keep=3: give holdfast.Keep(last=3)"),
    ({"keep": {"last": 3}}, TypeError, "keep={'last': 3}: give holdfast.Keep(last=3)"),
    ({"keep_fast": "2"}, TypeError, "keep_fast='2': give rules, such as holdfast.Keep(last=3)"),
    ({"upload": 5}, TypeError, "upload=5: give holdfast.storage.Upload(…)"),
    ({"every": 1.5}, TypeError, "every=1.5: give a whole number, at least 1"),
    ({"every": "10"}, TypeError, "every='10': give a whole number, at least 1"),
    ({"every": True}, TypeError, "every=True: give a whole number, at least 1"),
    ({"every": 0}, ValueError, "every=0: give a whole number, at least 1"),
    ({"poll": 0}, ValueError, "poll=0: give a whole number, at least 1"),
    ({"signals": None}, TypeError, "signals=None: give signals, such as (signal.SIGTERM,), or () for none"),
    ({"deadline": None}, TypeError, "deadline=None: give a number of seconds, more than 0"),
    ({"deadline": 0}, ValueError, "deadline=0: give a number of seconds, more than 0"),
    ({"grace": "25"}, TypeError, "grace='25': give a number of seconds, at least 0"),
    ({"worker": "proces"}, ValueError, """worker='proces': give "process", "thread" or "none\""""),
    ({"busy": "never"}, ValueError, """busy='never': give "wait" or "skip\""""),
    ({"slots": 0}, ValueError, "slots=0: give a whole number, at least 1"),
    ({"memory_limit": "1GB"}, TypeError, "memory_limit='1GB': give a whole number, at least 1, or None"),
    ({"on_failure": "ignore"}, ValueError, """on_failure='ignore': give "raise" or "warn\""""),
]


@pytest.mark.parametrize(("options", "kind", "says"), WRONG)
def test_the_manager_names_the_option(tmp_path: Path, options: dict[str, Any], kind: type, says: str) -> None:
    with pytest.raises(kind) as caught:
        holdfast.CheckpointManager(tmp_path / "run", **{"every": 5, **options})
    assert str(caught.value) == says and not (tmp_path / "run").exists()


def test_what_was_meant_is_taken(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": np.int64(2), "signals": [signal.SIGUSR1], "grace": 3, "deadline": np.float32(9)}
    with holdfast.CheckpointManager(tmp_path, worker="none", **options) as manager:
        assert manager.step(2, {"step": 2}) is not None
    holdfast.PerRank(1, elsewhere=lambda values, rank, size: values[0])


def test_calls_of_a_manager_name_the_argument(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="^root=None: give a path or a URL$"):
        holdfast.CheckpointManager(None, every=1)  # type: ignore[arg-type]
    model, state = nn.Linear(2, 2), {"model": nn.Linear(2, 2)}
    with holdfast.CheckpointManager(tmp_path, every=1, worker="none") as manager:
        for saving in (manager.step, manager.save):
            with pytest.raises(ValueError, match="^step=-1: give the number of steps that are done, at least 0$"):
                saving(-1, state)
            with pytest.raises(TypeError, match="^step is a dict: give the number of steps that are done, at least 0$"):
                saving(state, 1)  # type: ignore[arg-type]
        for _ in range(2):  # in an empty run, and in one that has a step
            with pytest.raises(TypeError, match="^state is a Linear: give a dict, such as "):
                manager.restore(model)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="^only=3: give names of the checkpoint, such as "):
                manager.restore(state, only=3)  # type: ignore[arg-type]
            manager.save(1, state)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda path, state: holdfast.save(str(path), state), TypeError, "path is a dict: give a path or a URL"),
        (lambda path, state: holdfast.save(state, None), TypeError, "path=None: give a path or a URL"),
        (lambda path, state: holdfast.save(state, path, deadline=0), ValueError, "deadline=0: give a number of"),
        (lambda path, state: holdfast.save(state, path, step=-1), ValueError, "step=-1: give the number of steps that"),
        (lambda path, state: holdfast.save(state, path, step=1.5), TypeError, "step=1.5: give the number of"),
        (lambda path, state: holdfast.Saver().save(state, 3), TypeError, "path=3: give a path or a URL"),
        (lambda path, state: holdfast.Saver().save(state, path, step=-1), ValueError, "step=-1: give the number of"),
        (lambda path, state: holdfast.load(state, str(path)), TypeError, "path is a dict: give a path or a URL"),
        (lambda path, state: holdfast.load(path, "r"), TypeError, "into='r': give a dict, such as "),
        (lambda path, state: holdfast.load(path, state, only=3), TypeError, "only=3: give names of the checkpoint"),
        (lambda path, state: holdfast.load(path, state, verify="all"), ValueError, "verify='all': give True, False or"),
        (lambda path, state: holdfast.load(path, state, verify=None), TypeError, "verify=None: give True, False or"),
        (lambda path, state: holdfast.load(path, state, verify=0), TypeError, "verify=0: give True, False or"),
        (lambda path, state: holdfast.load(path, state, share="of"), ValueError, """share='of': give "auto" or"""),
        (lambda path, state: holdfast.load(path, state, deadline="9"), TypeError, "deadline='9': give a number of"),
        (lambda path, state: holdfast.convert(path, path / "x", verify=0), TypeError, "verify=0: give True, False or"),
        (lambda path, state: holdfast.convert(path, path / "x", only=3), TypeError, "only=3: give names of the"),
        (
            lambda path, state: holdfast.convert(path, path / "x", max_shard_bytes="1GB"), TypeError,
            "max_shard_bytes='1GB': give a whole number of bytes, at least 1",
        ),
        (
            lambda path, state: holdfast.convert(path, path / "x", dtype="int8"), ValueError,
            "dtype='int8': give a floating dtype of torch, such as torch.bfloat16 or \"bfloat16\"",
        ),
        (
            lambda path, state: holdfast.open(path).read("model/w", verify="all"), ValueError,
            "verify='all': give True, False or",
        ),
        (
            lambda path, state: holdfast.open(path).state_dict(verify="all"), ValueError,
            "verify='all': give True, False or",
        ),
        (lambda path, state: holdfast.dcp.Reader(path, verify=0), TypeError, "verify=0: give True, False or"),
        (lambda path, state: holdfast.Keep(best="1"), TypeError, "Keep.best='1': give a whole number"),
        (
            lambda path, state: holdfast.PerRank(1, elsewhere="frist"), ValueError,
            """elsewhere='frist': give "error", "first" or a function""",
        ),
        (lambda path, state: holdfast.Saver(worker="none"), ValueError, """worker='none': give "process" or"""),
    ],
)  # fmt: skip
def test_functions_name_the_argument(
    tmp_path: Path, call: Callable[[Path, dict[str, Any]], Any], kind: type[Exception], says: str
) -> None:
    state = {"model": {"w": torch.ones(2)}}
    holdfast.save(state, tmp_path / "c")
    with pytest.raises(kind) as caught:
        call(tmp_path / "c", state)
    assert str(caught.value).startswith(says) and type(caught.value) is kind


def test_a_dtype_may_be_given_by_its_name(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    for name in ("bfloat16", "bf16"):
        converted = holdfast.convert(tmp_path / "c", tmp_path / name, dtype=name)
        assert converted.cast == {"model/w": ("float32", "bfloat16")}
