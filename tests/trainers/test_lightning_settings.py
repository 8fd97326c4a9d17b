"""Hyperparameters as plain values: what is kept, what is left out and named, and that the format takes all of it."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import Enum, IntEnum, IntFlag
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.trainers.lightning_settings import with_plain_settings, with_settings_types

Pair = namedtuple("Pair", "left right")


class Mode(str, Enum):
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


class Shape(Enum):
    ROUND = ("a", "tuple")
    PLAIN = "plain"


class Bits(IntFlag):
    A = 1
    B = 2


class Text(str):
    __slots__ = ()


@dataclass
class Net:
    width: int = 4
    root: Path = Path("/data")
    parts: list[Any] = field(default_factory=lambda: [Mode.FAST])


class Opaque:
    """Has no plain value."""


def kept(settings: Any) -> Any:
    return with_plain_settings({"hyper_parameters": settings})["hyper_parameters"]


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" is left out")[0] for record in caplog.records]


PLAIN = [
    (Path("a/b"), "a/b"),
    (PurePosixPath("c"), "c"),
    (Mode.FAST, "fast"),
    (Level.HIGH, 3),
    (Shape.PLAIN, "plain"),
    (Shape.ROUND, "ROUND"),
    (Bits.A | Bits.B, 3),
    (Text("text"), "text"),
    (date(2026, 1, 2), "2026-01-02"),
    (datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    (timedelta(minutes=1.5), 90.0),
    (bytearray(b"raw"), b"raw"),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.str_("text"), "text"),
    (torch.bfloat16, torch.bfloat16),
    (torch.device("cpu"), torch.device("cpu")),
    (torch.Size([2, 3]), torch.Size([2, 3])),
    (Net(), {"width": 4, "root": "/data", "parts": ["fast"]}),
    (Namespace(a=Namespace(b=Path("c"))), {"a": {"b": "c"}}),
    (SimpleNamespace(a=1), {"a": 1}),
    (OrderedDict(a=1), {"a": 1}),
    (MappingProxyType({"a": Level.HIGH}), {"a": 3}),
    (Pair(1, Mode.FAST), (1, "fast")),
    (range(3), [0, 1, 2]),
    ({"b", "a"}, ["a", "b"]),
    ({1: "one", 2: "two"}, {1: "one", 2: "two"}),
    ({Mode.FAST: 1, Level.HIGH: 2}, {"fast": 1, "3": 2}),
    ({1: "one", "x": "two"}, {"1": "one", "x": "two"}),
    ({}, {}),
    ([], []),
    ((), ()),
    (None, None),
]


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=lambda value: type(value).__name__)
def test_what_has_a_plain_value(value: Any, plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = kept({"key": value})["key"]
    assert found == plain and type(found) is type(plain) and left_out(caplog) == []


def test_arrays_are_kept_as_tensors() -> None:
    source = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    found = kept({"mean": source, "bias": torch.ones(2)})
    assert found["mean"].tolist() == source.tolist() and found["mean"].dtype == torch.float32
    assert found["bias"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [Opaque(), print, partial(print, 1), Net, nn.Linear(1, 1), np.array(["text"]), "\ud800", slice(1), Opaque],
    ids=lambda value: type(value).__name__,
)
def test_what_has_none_is_left_out_and_named(value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"opt": {"value": value, "lr": 0.1}, "rest": [1, value], "both": (value, 2), "net": Net(parts=[value])}
    found = kept(settings)
    net = {"width": 4, "root": "/data", "parts": []}
    assert found == {"opt": {"lr": 0.1}, "rest": [1], "both": (2,), "net": net}
    above = "hyper_parameters"
    assert left_out(caplog) == [f"{above}/{at}" for at in ("opt/value", "rest/1", "both/0", "net/parts/0")]


def test_what_cannot_be_written_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    circle: dict[str, Any] = {"lr": 0.1}
    circle["self"] = circle
    found = kept({"circle": circle, "alike": {1: "a", Text("1"): "b"}, "shared": [circle["lr"], circle["lr"]]})
    assert found == {"circle": {"lr": 0.1}, "alike": {"1": "a"}, "shared": [0.1, 0.1]}
    assert left_out(caplog) == ["hyper_parameters/circle/self", "hyper_parameters/alike/1"]


def test_all_that_is_kept_is_saved_and_comes_back(tmp_path: Path) -> None:
    settings = {str(i): value for i, (value, _) in enumerate(PLAIN)}
    plain = with_plain_settings({"epoch": 1, "datamodule_hyper_parameters": settings, "hparams_type": Net})
    holdfast.save(plain, tmp_path / "saved")
    assert holdfast.open(tmp_path / "saved").state_dict() == plain
    assert plain["hparams_type"] == f"{__name__}.Net" and plain["epoch"] == 1


leaves = st.sampled_from([value for value, _ in PLAIN] + [print, Opaque()]) | st.text() | st.floats(allow_nan=False)
keys = st.text() | st.integers() | st.sampled_from(list(Level)) | st.booleans() | st.tuples(st.integers())
nests = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.builds(Net, parts=inner))


@pytest.mark.slow
@given(st.dictionaries(st.text(), nests))
def test_whatever_they_are_a_save_goes_on(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    try:
        path = tmp_path_factory.mktemp("run") / "saved"
        plain = with_plain_settings({"hyper_parameters": settings})
        holdfast.save(plain, path)
        assert holdfast.open(path).state_dict() == plain
    finally:
        logging.disable(logging.NOTSET)


def test_omegaconf(caplog: pytest.LogCaptureFixture) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {
            "lr": 0.1,
            "mode": Mode.FAST,
            "net": omegaconf.OmegaConf.structured(Net(parts=[1])),
            "sizes": [1, "${lr}", {"deep": "${net.width}"}],
            "env": {"secret": "${oc.env:NO_SUCH_VARIABLE}", "later": "???", "none": None},
            7: "seven",
        }
    )
    plain = {
        "lr": 0.1, "mode": "fast", "net": {"width": 4, "root": "/data", "parts": [1]},
        "sizes": [1, 0.1, {"deep": 4}], "env": {"later": "???", "none": None}, "7": "seven",
    }  # fmt: skip
    found = with_plain_settings({"hyper_parameters": config, "hparams_type": type(config)})
    assert found == {"hyper_parameters": plain, "hparams_type": "omegaconf.dictconfig.DictConfig"}
    assert left_out(caplog) == ["hyper_parameters/env/secret"]
    assert kept({"cfg": config.net, "sizes": config.sizes, "plain": 1}) == {
        "cfg": plain["net"], "sizes": plain["sizes"], "plain": 1,
    }  # fmt: skip
    assert with_settings_types(found)["hparams_type"] is omegaconf.DictConfig
