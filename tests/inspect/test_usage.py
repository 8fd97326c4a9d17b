"""Bytes counted against the files themselves, and what deleting a step is said to free against deleting it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.commit.folder import delete_checkpoint
from holdfast.inspect.layout import Layouts
from holdfast.inspect.tree import Leaf, labels_of, tree
from holdfast.inspect.usage import modules, usage, usage_of_root
from tests import pool
from tests.citing import save_on, state_of
from tests.formats.truth import GOLDEN
from tests.inspect import plan_trials


def on_disk(root: Path) -> int:
    """Bytes of all files below, those with several names once."""
    stats = [path.stat() for path in root.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def test_sections_and_types(tmp_path: Path) -> None:
    tied = torch.zeros(10, 4)
    state = {
        "model": {"a": tied, "b": tied, "c": torch.zeros(3, dtype=torch.bfloat16)},
        "optimizer": {"m": torch.zeros(100)},
        "step": 3,
    }
    checkpoint = holdfast.save(state, tmp_path / "c", files={"x": b"12345"})
    found = usage(checkpoint)
    assert {a.name: (a.tensors, a.elements, a.nbytes) for a in found.by_section} == {
        "model": (2, 43, 166), "optimizer": (1, 100, 400)
    }  # fmt: skip
    assert {a.name: a.nbytes for a in found.by_dtype} == {"float32": 560, "bfloat16": 6}
    assert (found.tensors, found.files, found.attached, found.cited) == (566, checkpoint.nbytes, 5, 0)
    assert usage(checkpoint, only="optimizer").tensors == 400
    for find in (usage, modules):
        with pytest.raises(
            holdfast.errors.Mismatch, match=r"no tensor that fits 'modle' \(did you mean model\?\), 'step'$"
        ):
            find(checkpoint, only=["optimizer", "modle", "step"])


def grown(root: Path, *, links: bool) -> None:
    """Five steps that share; the first is deleted, but lends files on."""
    save_on(state_of(1), root / "step-1")
    save_on(state_of(2, model=1), root / "step-2", root / "step-1", links=links)
    save_on(state_of(3, model=1, optimizer=1), root / "step-3", root / "step-2", links=links)
    save_on(state_of(4, head=5), root / "step-4", root / "step-1", links=links)
    save_on(state_of(5, head=5, embedding=9), root / "step-5", root / "step-4", links=links)
    delete_checkpoint(root / "step-1")


def copied(source: Path, target: Path) -> None:
    """With hard links between files as they are."""
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.mark.parametrize("links", [False, True], ids=["cited", "linked"])
def test_what_deleting_frees(tmp_path: Path, links: bool) -> None:
    grown(tmp_path / "run", links=links)
    found = usage_of_root(tmp_path / "run")
    assert found.nbytes == on_disk(tmp_path / "run") and found.leavings == 0
    assert [step.name for step in found.steps] == ["step-2", "step-3", "step-4", "step-5"]
    freed = {}
    for step in found.steps:
        copied(tmp_path / "run", tmp_path / step.name)
        delete_checkpoint(tmp_path / step.name / step.name)
        freed[step.name] = found.nbytes - on_disk(tmp_path / step.name)
    assert {step.name: step.frees for step in found.steps} == freed
    assert len(set(freed.values())) > 1 and all(step.shared <= step.nbytes for step in found.steps)


def test_what_no_checkpoint_needs(tmp_path: Path) -> None:
    save_on(state_of(1), tmp_path / "step-1")
    save_on(state_of(2), tmp_path / "step-2")
    (tmp_path / "step-2" / "manifest.json").unlink()
    found = usage_of_root(tmp_path)
    assert found.leavings == on_disk(tmp_path / "step-2") and found.nbytes == on_disk(tmp_path)
    with pytest.raises(holdfast.errors.NotACheckpoint):
        usage_of_root(tmp_path / "step-2")


NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
QUICK = ("dcp_fsdp2_tied_2r", "ds_zero3_fp32_2r", "olmo_local_2r", "hf_safetensors_single_tied")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_format(name: str) -> None:
    checkpoint = holdfast.open(GOLDEN / name / "ckpt")
    found, top = usage(checkpoint), modules(checkpoint)
    expected = sum(t.numel() * t.element_size() for t in map(checkpoint.read, checkpoint.manifest.tensors))
    assert found.tensors == expected == top.nbytes == sum(a.nbytes for a in found.by_dtype)
    assert top.tensors == len(checkpoint.manifest.tensors)
    layouts = Layouts(checkpoint)
    for tensor, info in checkpoint.tensors.items():
        layout = layouts.of(tensor)
        assert layout.cells == len(info.boxes) == len(layouts.boxes(tensor)) and str(layout)


# Names by module


def test_labels_are_the_name() -> None:
    for name in ("model/layers.0.w", "a", "a..b", ".a/", "x/y.z/", "optimizer/state/w/exp_avg", "a%2Eb"):
        assert "".join(labels_of(name)) == name
    assert labels_of("model/layers.0.w") == ["model/", "layers.", "0.", "w"]


def folded(names: list[str], kinds: dict[str, str] | None = None) -> list[tuple[int, str, int, int]]:
    leaves = [Leaf(n, 4, 1, (kinds or {}).get(n)) for n in names]
    return [(level, node.label, node.tensors, node.nbytes) for level, node in tree(leaves).walk()]


def test_layers_that_are_alike_are_one() -> None:
    names = [f"m/layers.{i}.{w}" for i in range(12) for w in ("wq", "wk")] + ["m/norm"]
    assert folded(names) == [
        (0, "m/", 25, 100), (1, "layers.{0-11}.", 24, 96), (2, "wq", 12, 48), (2, "wk", 12, 48), (1, "norm", 1, 4)
    ]  # fmt: skip


def test_layers_that_differ_stay_apart() -> None:
    names = [f"m.{i}.w" for i in range(6)]
    other = {f"m.{i}.w": "odd" if i % 2 else "even" for i in range(6)}
    assert [label for _, label, _, _ in folded(names, other)] == ["m.", "{0,2,4}.w", "{1,3,5}.w"]
    assert [label for _, label, _, _ in folded(["m.0.w", "m.1.v"])] == ["m.", "0.w", "1.v"]


def test_experts_in_layers() -> None:
    names = [f"m.layers.{i}.experts.{e}.w" for i in range(4) for e in range(8)]
    assert folded(names) == [(0, "m.layers.{0-3}.experts.{0-7}.w", 32, 128)]


def test_a_tensor_that_has_others_below_it() -> None:
    assert folded(["w", "w.scale", "v"]) == [(0, "w", 1, 4), (0, "w.scale", 1, 4), (0, "v", 1, 4)]


def test_names_of_any_depth_and_numbers_of_any_length() -> None:
    deep, digits = ".".join(["a"] * 5000), ["m." + digit * 5000 for digit in "12"]
    assert "".join(labels_of(deep)) == deep and [label for _, label, _, _ in folded([deep, *digits])] == [
        deep, "m.", *(name[2:] for name in digits)
    ]  # fmt: skip
    assert len(folded([deep, deep + ".b", deep + ".c"])) == 4


def test_ten_thousand_tensors_are_few_lines() -> None:
    names = [f"{s}/layers.{i}.{m}.weight" for s in ("a", "b", "c") for i in range(400) for m in "opqrstuvw"]
    assert len(folded(names)) == 3 * 10


def test_who_wrote_what(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    pool.run(4, plan_trials.save, path, "FSDP2 x TP 2x2")
    checkpoint = holdfast.open(path)
    layouts = Layouts(checkpoint)
    up, down = layouts.of("model/blocks.0.up.weight"), layouts.of("model/blocks.0.down.weight")
    assert (up.grid, up.ranks, up.cells) == ((4, 1), "0-3", 4) and (down.grid, down.ranks) == ((2, 2), "0-3")
    assert str(down) == "2×2, ranks 0-3"
    assert [box for box, _ in layouts.boxes("model/blocks.0.down.weight")] == [
        "[0:3,0:5]", "[0:3,5:10]", "[3:6,0:5]", "[3:6,5:10]"
    ]  # fmt: skip
