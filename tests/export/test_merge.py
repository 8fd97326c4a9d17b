"""Merges: the sums are those of a float64 reference, whatever the formats, layouts, targets and ranks are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from math import acos, sin
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.export import draft, summing
from holdfast.export.merge import ema_weights
from holdfast.export.work import Converted
from holdfast.remap import Remap, Rename, Transpose
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from holdfast.tools import merge
from tests import pool
from tests.export import states
from tests.export.killing import killed_in_its_middle
from tests.formats.truth import GOLDEN
from tests.marks import examples

WEIGHTS = (0.1, 0.2, 0.3, 0.4)
ROWS, WIDTH = 2501, 2003
"""20 MB of float32, whose rows end nowhere near a block."""

Model = dict[str, torch.Tensor]


def model(seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """Tensors of several windows, small ones, none at all, and some that are not summed."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "emb.weight": some(ROWS, WIDTH), "norm.bias": some(77), "norm.weight": some(7, 11), "scale": some(1)[0],
        "none": torch.empty(0, 3), "positions": torch.arange(50), "seen": torch.tensor(seed),
    }  # fmt: skip


def models() -> list[Model]:
    return [model(seed, torch.bfloat16 if seed == 1 else torch.float32) for seed in range(4)]


def save_shards(path: str) -> None:
    """On each of two ranks: rows of the large tensor, the first rank more of them."""
    whole, rank = models()[0], dist.get_rank()
    rows = whole["emb.weight"][:1300] if rank == 0 else whole["emb.weight"][1300:]
    sharded = holdfast.Shard(rows.clone(), (ROWS, WIDTH), (1300 * rank, 0))
    holdfast.save({"model": {**whole, "emb.weight": sharded}, "optimizer": {"m": torch.ones(3)}}, path)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four models in four formats: of two ranks of holdfast, a hub folder, a file of torch, a folder of torch's DCP."""
    folder = tmp_path_factory.mktemp("merge")
    native, hub, file, distributed = (folder / name for name in ("native", "hub", "file.pt", "dcp"))
    pool.run(2, save_shards, str(native))
    _, second, third, fourth = models()
    hub.mkdir()
    save_file(second, hub / "model.safetensors")
    torch.save(third, file)
    dcp.save({"model": fourth, "step": 4}, checkpoint_id=distributed, no_dist=True)
    return [native, hub, file, distributed]


def reference(of: Sequence[Model], weights: Sequence[float], dtype: torch.dtype | None = None) -> Model:
    """The sums in float64, in the order of the sources, rounded once."""
    expected = dict(of[-1])
    for name, last in expected.items():
        if last.is_floating_point():
            total = sum(weight * one[name].double() for weight, one in zip(weights, of, strict=True))
            assert isinstance(total, torch.Tensor)
            expected[name] = total.to(dtype or last.dtype)
    return expected


def written(path: Path, to: str) -> Model:
    """The model in a target, read without this library where that can be."""
    if to == "huggingface":
        return load_file(path / "model.safetensors")
    if to == "torch":
        found: Model = torch.load(path, weights_only=True)["model"]
        return found
    opened = holdfast.open(path)
    return {name.removeprefix("model/"): opened.read(name) for name in opened.tensors}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("to", ["holdfast", "huggingface", "torch", "dcp"])
@pytest.mark.fast_cases("holdfast-bfloat16", "huggingface-float32", "torch-float32", "dcp-bfloat16")
def test_four_formats_give_the_sums_in_float64(
    to: Any, dtype: torch.dtype | None, sources: list[Path], tmp_path: Path
) -> None:
    merged = merge(sources, tmp_path / "t", weights=WEIGHTS, to=to, dtype=dtype)
    states.same(written(tmp_path / "t", to), reference(models(), WEIGHTS, dtype))
    of_model = sum(tensor.nbytes for one in models() for tensor in one.values())
    assert of_model <= merged.bytes_read <= 1.04 * of_model, "each byte is read once"
    assert {name.rpartition("/")[2] for name in merged.not_summed} == {"positions", "seen"}
    assert "optimizer/m" not in merged.tensors


def test_float32_is_nearly_the_same(sources: list[Path], tmp_path: Path) -> None:
    merge(sources, tmp_path / "t", weights=WEIGHTS, accumulate=torch.float32)
    for name, expected in reference(models(), WEIGHTS).items():
        torch.testing.assert_close(written(tmp_path / "t", "holdfast")[name], expected, rtol=1e-6, atol=1e-6)


def test_by_default_a_uniform_soup_of_models(sources: list[Path], tmp_path: Path) -> None:
    merged = merge([*sources[1:], sources[0]], tmp_path / "t")
    order = models()
    states.same(written(tmp_path / "t", "holdfast"), reference([*order[1:], order[0]], [0.25] * 4))
    assert merged.skipped == ["optimizer/m"], "said, and no average of moments"


def test_a_moving_average_and_task_arithmetic(sources: list[Path], tmp_path: Path) -> None:
    assert sum(ema_weights(9, 0.97)) == pytest.approx(1)
    value, numbers = 3.0, [3.0, 5.0, -1.0]
    for number in numbers[1:]:
        value = 0.9 * value + 0.1 * number
    assert sum(w * x for w, x in zip(ema_weights(3, 0.9), numbers, strict=True)) == pytest.approx(value)
    assert ema_weights(1, 0.9) == (1.0,) and ema_weights(3, 1.0) == (1.0, 0.0, 0.0)
    merge(sources[1:], tmp_path / "ema", decay=0.9)
    states.same(written(tmp_path / "ema", "holdfast"), reference(models()[1:], ema_weights(3, 0.9)))
    merge(sources[1:], tmp_path / "task", base=sources[0], weights=[0.5, 0.25, 1.5])
    base, *others = models()
    found = written(tmp_path / "task", "holdfast")["emb.weight"]
    expected = base["emb.weight"].double()
    for weight, one in zip([0.5, 0.25, 1.5], others, strict=True):
        expected = expected + weight * (one["emb.weight"].double() - base["emb.weight"].double())
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-7)


def slerp(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    a, b = a.double(), b.double()
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    if not abs(cosine) <= 0.9995:
        return (1 - t) * a + t * b
    angle = acos(cosine)
    return (sin((1 - t) * angle) * a + sin(t * angle) * b) / sin(angle)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp(t: float, sources: list[Path], tmp_path: Path) -> None:
    pair = [sources[1], sources[0]]
    merged = merge(pair, tmp_path / "t", method="slerp", t=t)
    found, (a, b) = written(tmp_path / "t", "holdfast"), (models()[1], models()[0])
    for name in ("emb.weight", "norm.bias", "norm.weight", "scale"):
        torch.testing.assert_close(found[name], slerp(a[name], b[name], t).float(), rtol=1e-6, atol=1e-7)
    of_model = sum(tensor.nbytes for one in (a, b) for tensor in one.values())
    times = 2 if 0 < t < 1 else 1 + (b if t else a)["emb.weight"].nbytes / of_model
    assert merged.bytes_read == pytest.approx(times * of_model, rel=0.04), "twice; a source that does not count once"


def test_slerp_of_parallel_tensors_and_of_zeros_is_linear(tmp_path: Path) -> None:
    a = {"same": torch.arange(9.0), "zero": torch.zeros(5), "opposite": torch.ones(3)}
    b = {"same": torch.arange(9.0) * 3, "zero": torch.ones(5), "opposite": -torch.ones(3)}
    for name, one in (("a", a), ("b", b)):
        holdfast.save({"model": one}, tmp_path / name)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "t", method="slerp", t=0.25)
    states.same(written(tmp_path / "t", "holdfast"), reference([a, b], [0.75, 0.25]))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64]


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_any_shapes_dtypes_and_weights(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With windows of a few elements: sums over several groups of sources, and tensors in many windows."""
    pick, folder = data.draw, tmp_path_factory.mktemp("any")
    count = pick(st.integers(1, 6))
    weights = pick(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.1, 3.7]), min_size=count, max_size=count))
    shapes = pick(st.lists(st.lists(st.integers(0, 14), max_size=3).map(tuple), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(pick(st.integers(0, 99)))
    complex_ = [pick(st.booleans()) and pick(st.booleans()) for _ in shapes]
    of: list[Model] = []
    for number in range(count):
        dtypes = [torch.complex64 if odd else pick(st.sampled_from(DTYPES[:-1])) for odd in complex_]
        tensors = zip(shapes, dtypes, strict=True)
        of.append({
            str(i): torch.randn(shape, dtype=dtype if dtype.is_complex else None, generator=generator).to(dtype)
            for i, (shape, dtype) in enumerate(tensors)
        })  # fmt: skip
        holdfast.save({"model": of[-1]}, folder / str(number))
    to = pick(st.sampled_from(["torch", "dcp"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "WINDOW", 512)
        patch.setattr(draft, "BLOCK", 256)
        patch.setattr(summing, "CHUNK", 16)
        patch.setattr(summing, "SOURCES", pick(st.sampled_from([1, 512, 32 << 20])))
        merge([folder / str(i) for i in range(count)], folder / "t", weights=weights, to=to)
    found = written(folder / "t", to)
    for name, last in of[-1].items():
        wide = torch.complex128 if last.is_complex() else torch.float64
        terms = [weight * one[name].to(wide) for weight, one in zip(weights, of, strict=True) if weight]
        expected = sum(terms) if terms else torch.zeros(last.shape)
        assert isinstance(expected, torch.Tensor)
        assert found[name].dtype == last.dtype
        torch.testing.assert_close(
            found[name].to(wide), expected.to(last.dtype).to(wide), rtol=0, atol=0, equal_nan=True
        )


def merged(paths: list[str], target: str, options: dict[str, Any]) -> Converted:
    return merge(paths, target, **options)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (4, {"weights": WEIGHTS, "to": "dcp"}), (4, {"decay": 0.5, "to": "huggingface", "dtype": torch.float16}),
        (2, {"method": "slerp", "t": 0.4}),
    ],
    ids=["dcp", "huggingface", "slerp"],
)  # fmt: skip
def test_the_same_bytes_on_one_and_on_two_ranks(
    count: int, options: dict[str, Any], sources: list[Path], tmp_path: Path
) -> None:
    paths = [str(path) for path in sources[:count]]
    alone = merged(paths, str(tmp_path / "one"), options)
    both = pool.run(2, merged, paths, str(tmp_path / "two"), options)
    assert states.files(tmp_path / "one") == states.files(tmp_path / "two")
    assert all(0 < one.bytes_read < 0.9 * alone.bytes_read for one in both), "the work is split"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def merge_and_be_killed(paths: list[str], target: str) -> None:
    """Merge window by window, and be killed in its middle."""
    killed_in_its_middle(target, lambda: merge(paths, target))


def test_killed_the_same_call_goes_on(sources: list[Path], tmp_path: Path) -> None:
    paths = [str(path) for path in sources]
    (died,) = pool.attempt(1, merge_and_be_killed, paths, str(tmp_path / "t"))
    pool.close(1)
    assert died.kinds == ["Killed"] and not (tmp_path / "t").exists()
    resumed, fresh = merge(paths, tmp_path / "t"), merge(paths, tmp_path / "fresh")
    assert resumed.bytes_resumed > 0 and resumed.bytes_read < fresh.bytes_read
    assert states.files(tmp_path / "t") == states.files(tmp_path / "fresh")
    pool.attempt(1, merge_and_be_killed, paths, str(tmp_path / "other"))
    pool.close(1)
    assert not merge(paths, tmp_path / "other", weights=WEIGHTS).bytes_resumed, "other weights are another merge"


MEASURED = """
import sys
from pathlib import Path

import torch


def status(field):
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


torch.ones(10).sum()
before = status("VmRSS")
from holdfast.tools import merge

for dtype in (None, torch.bfloat16):
    merge(sys.argv[2:], sys.argv[1], dtype=dtype, overwrite=True)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 16])
def test_memory_stays_bounded(count: int, tmp_path: Path) -> None:
    """Four formats of a model of 240 MB, and sixteen sources: less than one of them, with all that is imported."""
    tensors = {"w": torch.randn(10_000, 6_000), "b": torch.randn(300)}
    paths = [tmp_path / name for name in ("native", "hub", "file.pt", "dcp")]
    holdfast.save({"model": tensors}, paths[0])
    paths[1].mkdir()
    save_file(tensors, paths[1] / "model.safetensors")
    torch.save(tensors, paths[2])
    dcp.save({"model": tensors}, checkpoint_id=paths[3], no_dist=True)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "t"), *map(str, paths * (count // 4))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 256 << 20


REAL = ["composer_pt", "megatron_flat_tp2", "olmo_torch_new_2r", "torchsnapshot_fsdp1_2r", "hfai_3r"]


def test_what_other_libraries_wrote(tmp_path: Path) -> None:
    opened = [holdfast.open(GOLDEN / name / "ckpt") for name in REAL]
    merge(opened, tmp_path / "t")
    of = [{name: one.read(name) for name in one.tensors if name.startswith("model/")} for one in opened]
    found = holdfast.open(tmp_path / "t")
    for name, expected in reference(of, [0.2] * 5).items():
        assert torch.equal(found.read(name), expected), name


def test_a_checkpoint_with_itself_is_itself(source: Path, tmp_path: Path) -> None:
    """Every dtype, tied tensors, shards by rows and by columns, values, and what differs by rank."""
    done = merge([source] * 3, tmp_path / "t", weights=[0.5, 0.25, 0.25], only="*")
    merged, before = holdfast.open(tmp_path / "t"), holdfast.open(source)
    merged.verify()
    states.same(states.whole(merged), states.whole(before))
    assert merged.attachments == before.attachments and not done.left_out and not done.skipped
    assert done.bytes_read <= 3.1 * sum(info.nbytes for info in before.tensors.values())


def test_to_and_from_a_store(tmp_path: Path) -> None:
    store = StorePlace(Memory(), "run")
    for number in range(3):
        holdfast.save({"model": {"w": torch.full((9,), float(number))}, "step": number}, store / str(number))
    merge([store / "0", store / "1", store / "2"], store / "soup", only=["model", "step"])
    assert holdfast.open(store / "soup").read("model/w").tolist() == [1.0] * 9
    assert holdfast.open(store / "soup").values == {"step": 2}, "as in the last source"


def test_another_layout_by_a_map(tmp_path: Path) -> None:
    weight, turned = torch.randn(300, 20), torch.randn(20, 300)
    holdfast.save({"model": {"w": weight}}, tmp_path / "a")
    holdfast.save({"model": {"v": turned}}, tmp_path / "b")
    layout = Remap((Rename("v", "w"), Transpose("w")))
    merge([holdfast.open(tmp_path / "b", remap=layout), tmp_path / "a"], tmp_path / "t")
    states.same(written(tmp_path / "t", "holdfast"), reference([{"w": turned.T}, {"w": weight}], [0.5, 0.5]))


def test_tied_tensors(tmp_path: Path) -> None:
    """One tensor in the target if it is one in every source that has both names."""
    shared, head = torch.ones(4), torch.full((4,), 5.0)
    holdfast.save({"model": {"emb": shared, "head": shared}}, tmp_path / "tied")
    holdfast.save({"model": {"emb": shared * 3, "head": head}}, tmp_path / "two")
    holdfast.save({"model": {"emb": shared * 7}}, tmp_path / "one")
    assert merge([tmp_path / "one", tmp_path / "tied"], tmp_path / "t").tied == {"model/head": "model/emb"}
    assert holdfast.open(tmp_path / "t").read("model/head").tolist() == [4.0] * 4
    assert not merge([tmp_path / "two", tmp_path / "tied"], tmp_path / "t", overwrite=True).tied
    found = holdfast.open(tmp_path / "t")
    assert found.read("model/emb").tolist() == [2.0] * 4 and found.read("model/head").tolist() == [3.0] * 4
    assert merge([tmp_path / "tied", tmp_path / "one"], tmp_path / "t", overwrite=True).tensors == ["model/emb"]
    with pytest.raises(holdfast.errors.Mismatch, match="one has no model/head"):
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "u")


def test_sources_that_do_not_fit(tmp_path: Path) -> None:
    a: dict[str, Any] = {"w": torch.ones(3), "x": torch.ones(2, 2), "i": torch.arange(4), "only_a": torch.ones(1)}
    b: dict[str, Any] = {"w": torch.ones(4), "x": torch.ones(2, 2).char(), "i": torch.arange(4) + 1}
    c: dict[str, Any] = {"q": torch.ones(3).to(torch.float8_e4m3fn), "q_scale_inv": torch.ones(1)}
    for name, state in (("a", a), ("b", b), ("c", c)):
        holdfast.save({"model": state}, tmp_path / name)
    both = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        merge(both, tmp_path / "t")
    text = str(caught.value)
    assert "b has no model/only_a, which" in text and "model/w is [3] in" in text and "model/x is float32 in" in text
    with pytest.raises(holdfast.errors.Mismatch, match="a has no model/q"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "t", only="model/q*")
    with pytest.raises(holdfast.errors.Mismatch, match="float8_e4m3fn with scales of its own"):
        merge([tmp_path / "c"] * 2, tmp_path / "t")
    with pytest.raises(holdfast.errors.Mismatch, match="model/i is int64, which cannot be summed"):
        merge(both, tmp_path / "t", only="model/i")
    with pytest.raises(holdfast.errors.Mismatch, match="nothing that fits only='model/n'"):
        merge(both, tmp_path / "t", only="model/n")
    with pytest.raises(holdfast.errors.Mismatch, match="is the source, or around it"):
        merge(both, tmp_path / "a", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": [1.0]}, "weights are 2 finite numbers"), ({"weights": [1.0, float("nan")]}, "2 finite numbers"),
        ({"weights": [1.0, 0.0], "decay": 0.5}, "decay= gives the weights"), ({"decay": 2.0}, "decay is between"),
        ({"base": "a"}, "base= needs weights="), ({"t": 0.5}, "t goes with"), ({"method": "ties"}, "method is one of"),
        ({"method": "slerp"}, "t is between"), ({"method": "slerp", "t": 0.5, "weights": [1, 1]}, "neither weights="),
        ({"accumulate": torch.bfloat16}, "accumulate is"), ({"to": "onnx"}, "to is one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "t", **options)
    for nothing in ([], str(tmp_path)):
        with pytest.raises(ValueError, match="a list of at least one checkpoint"):
            merge(nothing, tmp_path / "t")
    assert not list(tmp_path.iterdir())
