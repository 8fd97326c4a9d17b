"""hfai's parts: written here after its published algorithm, on any number of ranks, and read back to the last bit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.formats.sources import File
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import truth
from tests.formats.truth import same

LARGE = 64


def dealt(state: dict[Any, Any], rank: int, world: int) -> dict[Any, Any]:
    """A rank's share of the small ones."""
    return {key: value for i, (key, value) in enumerate(state.items()) if i % world == rank}


def chunk(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor | None:
    """A rank's share of a large one; None where torch makes fewer chunks than there are ranks."""
    chunks = tensor.reshape(-1).chunk(world)
    return chunks[rank].clone() if rank < len(chunks) else None


def is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > LARGE


def model_part(state: dict[str, torch.Tensor], buffers: set[str], rank: int, world: int) -> tuple[Any, Any]:
    params = {k: v for k, v in state.items() if k not in buffers}
    cut = {k: (v.shape, chunk(v, rank, world)) for k, v in params.items() if is_large(v)}
    small = dealt({k: v for k, v in params.items() if not is_large(v)}, rank, world)
    if rank == 0:
        small.update((k, state[k]) for k in buffers)
    return small, {k: pair for k, pair in cut.items() if pair[1] is not None}


def optimizer_part(osd: dict[str, Any], rank: int, world: int) -> tuple[Any, Any]:
    cut = {
        (i, k): (v.shape, chunk(v, rank, world))
        for i, leaf in osd["state"].items()
        for k, v in leaf.items()
        if is_large(v)
    }
    rest = {i: {k: v for k, v in leaf.items() if not is_large(v)} for i, leaf in osd["state"].items()}
    small = {**osd, "state": dealt(rest, rank, world)}
    return small, {k: pair for k, pair in cut.items() if pair[1] is not None}


def save(
    folder: Path, world: int, models: list[dict[str, torch.Tensor]], optimizers: list[dict[str, Any]],
    others: dict[str, Any], buffers: set[str] = frozenset(),
) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        part = {"__nshards__": world, "__version__": "2.0.0"}
        part["model"] = [model_part(m, set(buffers) & m.keys(), rank, world) for m in models]
        part["optimizer"] = [optimizer_part(o, rank, world) for o in optimizers]
        torch.save({**part, **(others if rank == 0 else {})}, folder / f"PART_{rank:03d}.pt")


def model(seed: int, shapes: dict[str, tuple[int, ...]], prefix: str = "module.") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def adam(params: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = {
        i: {"step": torch.tensor(3.0), "exp_avg": p * 2, "exp_avg_sq": p.double() * 3}
        for i, p in enumerate(params.values())
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(state)}]}


SHAPES = {"a.weight": (7, 11), "a.bias": (7,), "deep": (2, 3, 5, 4), "one": (), "tiny": (3,), "few": (17, 1)}


def check(checkpoint: holdfast.Checkpoint, params: dict[str, torch.Tensor], osd: dict[str, Any], at: str = "") -> None:
    for name, tensor in params.items():
        assert same(checkpoint.read(f"model{at}/{name.removeprefix('module.')}"), tensor), name
    for i, leaf in osd["state"].items():
        for key, tensor in leaf.items():
            assert same(checkpoint.read(f"optimizer{at}/state/{i}/{key}"), tensor), (i, key)


def test_the_golden_one() -> None:
    checkpoint = truth.check("hfai_3r")
    assert (checkpoint.step, checkpoint.world_size, checkpoint.format) == (3, 3, "hfai.checkpoint")
    assert checkpoint.values["epoch"] == 1 and checkpoint.values["lr_sched"]["last_epoch"] == 3
    assert truth.check("hfai_3r", truth.GOLDEN / "hfai_3r" / "ckpt" / "PART_001.pt").reading


@pytest.mark.parametrize("world", range(1, 9))
def test_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    params = {**model(world, SHAPES), "module.seen": torch.tensor(5), "module.scale": torch.randn(40)}
    osd = adam(params)
    save(tmp_path / "latest.pt", world, [params], [osd], {"step": 9, "epoch": 2}, {"module.seen", "module.scale"})
    checkpoint = holdfast.open(tmp_path / "latest.pt")
    check(checkpoint, params, osd)
    assert set(checkpoint.state_dict()["model"]) == {name.removeprefix("module.") for name in params}
    assert (checkpoint.step, checkpoint.world_size) == (9, world)
    assert checkpoint.state_dict()["optimizer"]["param_groups"] == osd["param_groups"]
    checkpoint.verify()


@given(world=st.integers(1, 9), shape=st.lists(st.integers(1, 7), max_size=4).map(tuple))
def test_chunks_of_any_shape(world: int, shape: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = LocalPlace(tmp_path_factory.mktemp("hfai"))
    params = {"w": torch.arange(prod(shape), dtype=torch.float64).reshape(shape)}
    save(folder, world, [params], [], {})
    checkpoint = holdfast.open(folder)
    assert same(checkpoint.read("model/w"), params["w"]) and "optimizer" not in checkpoint.values
    box = [(n // 3, n) for n in shape]
    assert same(checkpoint.read("model/w", box), params["w"][tuple(slice(*b) for b in box)])


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    models = [model(i, SHAPES, "") for i in range(2)]
    osds = [adam(m) for m in models]
    save(tmp_path, 3, models, osds, {})
    checkpoint = holdfast.open(tmp_path)
    for i in range(2):
        check(checkpoint, models[i], osds[i], f"/{i}")


def test_it_loads_into_live_objects(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source, target = (torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5)) for _ in range(2))
    own, other = (torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in ((source, 0.1), (target, 0.5)))
    source(torch.randn(4, 9)).sum().backward()
    own.step()
    state = {f"module.{k}": v for k, v in source.state_dict().items()}
    save(tmp_path, 4, [state], [own.state_dict()], {"step": 1}, {f"module.{k}" for k, _ in source.named_buffers()})
    holdfast.load(tmp_path, {"model": target, "optimizer": other})
    assert all(same(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True))
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert all(same(own.state[p][key], other.state[q][key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert other.param_groups[0]["lr"] == 0.1


def test_opening_reads_no_tensor_and_a_slice_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"w": torch.randn(3000, 100)}
    save(tmp_path, 3, [params], [], {})
    read: list[int] = []
    before = File.read
    monkeypatch.setattr(File, "read", lambda self, begin, nbytes: read.append(nbytes) or before(self, begin, nbytes))
    checkpoint = holdfast.open(tmp_path)
    assert sum(read) < 20_000, "three pickles and directories, of 1.2 MB"
    counted: list[int] = []
    monkeypatch.setattr("holdfast.read.read.ReadStats.add", lambda self, nbytes: counted.append(nbytes))
    assert same(checkpoint.read("model/w", [(999, 1001)]), params["w"][999:1001])
    assert 800 <= sum(counted) < 100_000


# What is wrong is told


@pytest.fixture
def three(tmp_path: Path) -> Path:
    params = model(0, SHAPES)
    save(tmp_path, 3, [params], [adam(params)], {"step": 1})
    return tmp_path


def rewrite(path: Path, change: Any) -> None:
    part = torch.load(path, weights_only=False)
    change(part)
    torch.save(part, path)


@pytest.mark.parametrize("rank", range(3))
def test_a_missing_part(three: Path, rank: int) -> None:
    (three / f"PART_{rank:03d}.pt").unlink()
    with pytest.raises(holdfast.errors.Damaged, match=f"PART_{rank:03d}.pt is missing"):
        holdfast.open(three)


def test_a_part_too_many(three: Path) -> None:
    (three / "PART_003.pt").write_bytes((three / "PART_002.pt").read_bytes())
    with pytest.raises(holdfast.errors.Damaged, match="3 ranks, but holds PART_003.pt too"):
        holdfast.open(three)


@pytest.mark.parametrize("version", [None, "1.0.0", "2.1.0", 3])
def test_another_version(three: Path, version: Any) -> None:
    for path in three.glob("PART_*.pt"):
        rewrite(path, lambda p: p.pop("__version__") if version is None else p.update(__version__=version))
    with pytest.raises(holdfast.errors.Unsupported, match=rf"version {version or '1.0.0'} .*version 2.0.0 is read"):
        holdfast.open(three)


CHANGES = {
    "of a save in 5 parts": lambda p: p.update(__nshards__=5),
    "is of version 1.0.0": lambda p: p.update(__version__="1.0.0"),
    "other parameter groups": lambda p: p["optimizer"][0][0]["param_groups"][0]["params"].reverse(),
    "different numbers of models": lambda p: p["model"].append(({}, {})),
    "no list of pairs": lambda p: p.update(model={}),
    "no state or no param_groups": lambda p: p["optimizer"][0][0].pop("state"),
    "which a part before it holds too": lambda p: p["model"][0][0].update({f"module.{k}": 1 for k in SHAPES}),
    "parts 0, 2 hold": lambda p: p["model"][0][1].pop("module.a.weight"),
    "different shapes or types of module.deep": lambda p: p["model"][0][1].update(
        {"module.deep": (torch.Size([120]), torch.ones(40))}
    ),
    "is no pair of a shape and a flat chunk": lambda p: p["model"][0][1].update({"module.deep": torch.ones(40)}),
    "both whole and in chunks": lambda p: p["model"][0][0].update({"module.deep": torch.ones(2, 3, 5, 4)}),
    "belong to no state": lambda p: p["optimizer"][0][1].update({(77, "exp_avg"): (torch.Size([1]), torch.ones(1))}),
}  # fmt: skip


@pytest.mark.parametrize("text", CHANGES)
def test_a_part_that_contradicts_the_others(three: Path, text: str) -> None:
    rewrite(three / "PART_001.pt", CHANGES[text])
    with pytest.raises((holdfast.errors.Damaged, holdfast.errors.Unsupported), match=text):
        holdfast.open(three)


def test_a_part_cut_short(three: Path) -> None:
    path = three / "PART_001.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(holdfast.errors.Damaged, match=r"PART_001\.pt"):
        holdfast.open(three)


def test_a_folder_with_such_names_only_is_none_of_hfai(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "PART_000.pt")
    assert holdfast.open(tmp_path).format == "torch.save"
