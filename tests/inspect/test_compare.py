"""Two checkpoints compared: every status, the figures against NumPy, what is not read, and formats that are all one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.inspect import compare as module
from holdfast.inspect import reading
from holdfast.inspect.compare import Difference, compare, compare_names
from tests.damaging import flip
from tests.formats.truth import GOLDEN


@pytest.fixture(params=[64, 64 << 20], ids=["in boxes", "at once"])
def box(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "BOX", request.param)
    monkeypatch.setattr(reading.boxes_of, "__defaults__", (request.param,))
    monkeypatch.setattr(reading.groups, "__defaults__", (request.param,))
    return int(request.param)


def opened(path: Path, state: dict[str, Any]) -> holdfast.Checkpoint:
    holdfast.save(state, path)
    return holdfast.open(path)


def by_name(a: holdfast.Checkpoint, b: holdfast.Checkpoint, only: Any = "*") -> dict[str, Difference]:
    found = list(compare(a, b, only=only))
    assert len({d.name for d in found}) == len(found)
    return {d.name: d for d in found}


def test_every_status(tmp_path: Path, box: int) -> None:
    w = torch.arange(60.0).reshape(6, 10)
    a = opened(
        tmp_path / "a",
        {
            "m": {"same": w, "late": w, "shape": w, "type": w, "gone": w, "turned": w, "tied": (v := w * 2),
                  "tied2": v},
            "step": 3, "lr": 0.1, "off": 1, "kind": 1, "mine": holdfast.PerRank({"seen": torch.arange(3), "n": 1}),
            "own": holdfast.PerRank(math.nan),
        },
    )  # fmt: skip
    late = w.clone()
    late[5, 9] += 8
    b = opened(
        tmp_path / "b",
        {
            "m": {"same": w, "late": late, "shape": w[1:], "type": w.bfloat16(), "new": w, "tied": (u := v + 1),
                  "tied2": u},
            "turned": 1, "step": 4, "lr": 0.1, "on": 1, "kind": True,
            "mine": holdfast.PerRank({"seen": torch.arange(3) + 1, "n": 1}), "own": holdfast.PerRank(math.nan),
        },
    )  # fmt: skip
    found = by_name(a, b)
    assert {name: d.status for name, d in found.items()} == {
        "m/same": "same", "m/late": "changed", "m/shape": "shape", "m/type": "dtype", "m/gone": "only in a",
        "m/turned": "only in a", "m/tied": "changed", "m/tied2": "changed", "m/new": "only in b", "turned": "only in b",
        "step": "changed", "lr": "same", "off": "only in a", "on": "only in b", "kind": "changed", "mine": "changed",
        "own": "same",
    }  # fmt: skip
    assert found["m/tied2"].norm == found["m/tied"].norm == math.sqrt(60)
    late_one = found["m/late"]
    assert (late_one.largest, late_one.mean, late_one.norm) == (8.0, 8 / 60, 8.0)
    assert late_one.norm_a == pytest.approx(float(w.norm())) and late_one.norm_b == pytest.approx(float(late.norm()))
    assert late_one.cosine == pytest.approx(float(torch.cosine_similarity(w.flatten(), late.flatten(), 0)), rel=1e-6)
    assert late_one.relative == pytest.approx(8 / float(late.norm()))
    assert found["m/type"].largest == 0.0 and found["m/shape"].largest is None
    assert set(by_name(a, b, only=["m/t*", "step"])) == {"m/turned", "m/type", "m/tied", "m/tied2", "step"}
    for find in (compare, compare_names):
        assert list(find(a, b, only=["turned", "off"])), "one of the two has each"
        with pytest.raises(holdfast.errors.Mismatch, match=r"neither .* nor .* has a name that fits 'm/tie' \(did you"):
            list(find(a, b, only=["m/tied", "m/tie"]))


def test_a_tensor_here_and_a_value_there(tmp_path: Path) -> None:
    a = opened(tmp_path / "a", {"s": {"t": torch.tensor(3), "v": 3, "r": 1}})
    b = opened(tmp_path / "b", {"s": {"t": 3, "v": torch.tensor(3), "r": holdfast.PerRank(1)}})
    assert {name: d.status for name, d in by_name(a, b).items()} == {"s/t": "dtype", "s/v": "dtype", "s/r": "dtype"}


def test_the_last_bit_counts(tmp_path: Path, box: int) -> None:
    zeros = torch.zeros(40)
    a = opened(tmp_path / "a", {"m": {"zero": zeros, "nan": zeros * math.nan, "bool": zeros > 1, "long": zeros.long()}})
    one = torch.zeros(40, dtype=torch.long)
    one[39] = 1
    b = opened(
        tmp_path / "b", {"m": {"zero": -zeros, "nan": zeros * math.nan, "bool": one > 0, "long": one + (1 << 60)}}
    )
    found = by_name(a, b)
    assert (found["m/zero"].status, found["m/zero"].largest, found["m/zero"].cosine) == ("changed", 0.0, None)
    assert (found["m/nan"].status, found["m/bool"].norm, found["m/long"].status) == ("same", 1.0, "changed")


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64])
def test_figures_as_numpy_says(tmp_path: Path, box: int, kind: torch.dtype) -> None:
    torch.manual_seed(1)
    x, y = (torch.rand(13, 21).mul(9).to(kind) for _ in range(2))
    a, b = opened(tmp_path / "a", {"m": {"w": x}}), opened(tmp_path / "b", {"m": {"w": y}})
    p, q = (t.to(torch.complex128).numpy().reshape(-1) for t in (x, y))
    found = by_name(a, b)["m/w"]
    told = (found.largest, found.mean, found.cosine, found.norm_a, found.norm_b, found.norm)
    off, norms = np.abs(p - q), (np.linalg.norm(p), np.linalg.norm(q))
    right = (off.max(), off.mean(), np.vdot(p, q).real / norms[0] / norms[1], *norms, np.linalg.norm(off))
    assert told == pytest.approx(right, rel=1e-12)


def test_nan_and_infinity_are_counted_and_left_out(tmp_path: Path, box: int) -> None:
    x = torch.arange(50.0)
    x[3], x[4], x[5], x[6] = math.nan, math.inf, math.inf, 1.0
    y = x.clone()
    y[4], y[6], y[7] = -math.inf, math.nan, 9.0
    a, b = (
        opened(tmp_path / "a", {"m": {"w": x, "all": x * math.nan}}),
        opened(tmp_path / "b", {"m": {"w": y, "all": y}}),
    )
    found = by_name(a, b)
    assert (found["m/w"].nonfinite, found["m/w"].largest, found["m/w"].norm) == (2, 2.0, 2.0)
    assert (found["m/all"].largest, found["m/all"].norm_a, found["m/all"].status) == (None, None, "changed")


def test_equal_sums_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"m": {"w": torch.randn(100), "v": torch.randn(50)}}
    a, b = opened(tmp_path / "a", state), opened(tmp_path / "b", state | {"n": {"v": torch.ones(3)}})
    flip(next((tmp_path / "b" / "m").iterdir()), 4200)
    assert {(d.status, d.by_checksums) for d in compare(a, b, only="m")} == {("same", True)}
    state["m"]["v"] += 1
    c = opened(tmp_path / "c", state)
    read: list[str] = []
    together = module.read_together
    monkeypatch.setattr(module, "read_together", lambda of, names: read.extend(names) or together(of, names))
    assert {d.name: d.status for d in compare(a, c)} == {"m/w": "same", "m/v": "changed"}
    assert read == ["m/v", "m/v"]
    assert {d.name: d.by_checksums for d in compare(a, c)} == {"m/w": True, "m/v": False}


def test_damage_is_no_difference(tmp_path: Path) -> None:
    a = opened(tmp_path / "a", {"m": {"w": torch.zeros(1000)}})
    b = opened(tmp_path / "b", {"m": {"w": torch.ones(1000)}})
    flip(next((tmp_path / "b" / "m").iterdir()), 5000)
    with pytest.raises(holdfast.errors.Damaged, match="in m/w, have"):
        list(compare(a, b))


NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
QUICK = ("dcp_fsdp2_tp_2x2", "ds_zero1_bf16opt_2r", "hf_safetensors_single_tied", "torchsnapshot_fsdp1_2r")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_conversion_is_all_the_same(name: str, tmp_path: Path) -> None:
    source = GOLDEN / name / "ckpt"
    holdfast.convert(source, tmp_path / "ours")
    a, b = holdfast.open(source), holdfast.open(tmp_path / "ours")
    found = list(compare(a, b))
    assert {(d.status, d.by_checksums) for d in found} == {("same", False)}, [d for d in found if d.status != "same"]
    assert {d.name for d in found} >= set(a.tensors)
