"""Commands that make or delete checkpoints: what they do, what they say, and that a dry run does nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.cli.commands import Format
from holdfast.cli.errors import Code
from holdfast.export.work import FORMATS, To
from tests.cli.conftest import Run, state_of
from tests.damaging import contents_of
from tests.formats.truth import GOLDEN


def test_convert(steps: Path, run: Run) -> None:
    source, target = steps / "step-000000200", steps.parent / "out"
    code, out, err = run(
        "convert", source, target / "hf", "--to", "huggingface", "--dtype", "bf16", "--rename", "w=weight",
        "--extras", GOLDEN / "FIXTURES.md",
    )  # fmt: skip
    assert code == Code.FINE and "2 tensors" in out and "left out" in out, err
    found = load_file(target / "hf" / "model.safetensors")
    assert set(found) == {"frozen", "weight"} and found["weight"].dtype == torch.bfloat16
    assert (target / "hf" / "FIXTURES.md").is_file()
    code, out, _ = run("convert", source, target / "ours", "--only", "model", "--only", "step", "--step", 7, "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["to"] == "holdfast" and told["skipped"] == ["optimizer/m"]
    assert holdfast.open(target / "ours").step == 7
    assert run("convert", source, target / "ours")[0] == Code.STORAGE
    assert run("convert", source, target / "ours", "--overwrite", "--verify", "blocks")[0] == Code.FINE
    assert len(holdfast.open(target / "ours").tensors) == 3
    assert run("convert", GOLDEN / "dcp_fsdp2_4r" / "ckpt", target / "foreign", "--to", "dcp")[0] == Code.FINE


def test_a_folder_of_several_steps_says_which_one_is_converted(tmp_path: Path, run: Run) -> None:
    for step in ("step-3", "step-9"):
        (tmp_path / "run").mkdir(exist_ok=True)
        shutil.copytree(GOLDEN / "dcp_fsdp2_4r" / "ckpt", tmp_path / "run" / step)
    code, out, err = run("convert", tmp_path / "run", tmp_path / "one")
    assert code == Code.FINE and "is read as: the last of 2 steps, step-9" in out, err


def test_the_suffix_of_the_target_is_the_format(steps: Path, run: Run) -> None:
    source, target = steps / "step-000000200", steps.parent
    for name, to in (("x.pt", "torch"), ("x.ckpt", "torch"), ("folder", "holdfast")):
        assert json.loads(run("convert", source, target / name, "--json")[1])["to"] == to
    assert json.loads(run("convert", source, target / "y.v2", "--to", "hf", "--json")[1])["to"] == "huggingface"
    assert torch.load(target / "x.pt", weights_only=True)["step"] == 200


@pytest.mark.slow
def test_the_model_alone(steps: Path, run: Run) -> None:
    source, target = steps / "step-000000200", steps.parent
    code, out, _ = run("convert", source, target / "model.pt", "--model-only")
    assert code == Code.FINE and "the tensors of 'model'" in out
    expected = state_of(200)["model"]
    found = torch.load(target / "model.pt", weights_only=True)
    assert set(found) == {"frozen", "w"} and torch.equal(found["w"], expected["w"])  # type: ignore[index]
    assert run("convert", source, target / "hf", "--model-only", "--dtype", "float16")[0] == Code.FINE
    assert load_file(target / "hf" / "model.safetensors")["w"].dtype == torch.float16
    assert run("convert", source, target / "optimizer.pt", "--model-only", "--only", "optimizer")[0] == Code.FINE
    assert set(torch.load(target / "optimizer.pt", weights_only=True)) == {"m"}
    for name in ("hf2", "optim.pt"):
        code, _, err = run("convert", source, target / name, "--model-only", "--only", "optimiser")
        assert code == Code.MISMATCH and "no tensor that fits --only 'optimiser' (did you mean optimizer?)" in err
        assert not (target / name).exists()
    for more in (["--rename", "w=v"], ["--only", "model", "--only", "step"]):
        assert run("convert", source, target / "two.pt", "--model-only", *more)[0] == Code.USAGE


def test_the_suffix_of_a_url(steps: Path, run: Run) -> None:
    target = steps.parent / "model.pt"
    assert run("convert", steps / "step-000000200", f"file://{target}?a=b", "--json")[0] == Code.FINE
    assert (steps.parent / "model.pt?a=b").is_file(), "a file for torch, as its name says, whatever the options are"


@pytest.mark.slow
def test_no_path_is_no_working_directory(steps: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(steps)
    for command in (["prune"], ["prune", "--orphans"], ["ls"], ["verify"], ["copy", "out"], ["convert", "out"]):
        assert run(command[0], "", *command[1:])[0] == Code.USAGE


def test_the_model_of_other_formats_alone(tmp_path: Path, run: Run) -> None:
    for name in ("dcp_fsdp2_4r", "ds_zero3_fp32_2r", "composer_pt"):
        source = GOLDEN / name / "ckpt"
        code, _, err = run("convert", source, tmp_path / f"{name}.pt", "--model-only")
        assert code == Code.FINE, err
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        names = {tensor for tensor in holdfast.open(source).tensors if tensor.startswith("model/")}
        assert {f"model/{key}" for key, value in found.items() if isinstance(value, torch.Tensor)} == names


@pytest.mark.slow
def test_merge(steps: Path, run: Run) -> None:
    sources, target = [steps / f"step-000000{number}00" for number in (1, 2, 3)], steps.parent / "soup.pt"
    of = [state_of(number * 100)["model"]["w"] for number in (1, 2, 3)]  # type: ignore[index]

    def merged() -> torch.Tensor:
        found: torch.Tensor = torch.load(target, weights_only=True)["model"]["w"]
        return found

    code, out, err = run("convert", "--merge", *sources, target)
    assert code == Code.FINE and "not asked for" in out, err
    torch.testing.assert_close(merged(), sum(of) / 3)
    for more, expected in (
        (["--weights", "0.5,-0.25,2"], 0.5 * of[0] - 0.25 * of[1] + 2 * of[2]),
        (["--decay", 0.5], 0.25 * of[0] + 0.25 * of[1] + 0.5 * of[2]),
    ):
        assert run("convert", "--merge", *sources, target, "--overwrite", *more)[0] == Code.FINE
        torch.testing.assert_close(merged(), expected)
    task = ["--base", sources[0], "--weights", "0.5"]
    assert run("convert", "--merge", sources[1], target, "--overwrite", *task)[0] == Code.FINE
    torch.testing.assert_close(merged(), (of[0] + of[1]) / 2)
    code, out, _ = run("convert", "--merge", *sources[:2], target, "--overwrite", "--slerp", 1, "--json")
    assert code == Code.FINE and json.loads(out)["not_summed"] == []
    assert torch.equal(merged(), of[1])
    code, out, _ = run("convert", "--merge", *sources[:2], steps.parent / "m.pt", "--model-only", "--dtype", "bf16")
    assert code == Code.FINE and set(torch.load(steps.parent / "m.pt", weights_only=True)) == {"frozen", "w"}
    for wrong in (
        [*sources, target], [*sources[:1], target, "--decay", 0.5], ["--merge", *sources, target, "--slerp", 0.5],
        ["--merge", *sources, target, "--weights", "a,b,c"], ["--merge", *sources, target, "--weights", "1,2"],
    ):  # fmt: skip
        assert run("convert", *wrong)[0] == Code.USAGE, wrong


def test_copy(steps: Path, run: Run) -> None:
    target = steps.parent / "copies"
    code, out, _ = run("copy", steps, target, "--bandwidth", "1GB")
    assert code == Code.FINE and "5 steps" in out and holdfast.open(target / "step-000000500").verify() is not None
    code, out, _ = run("copy", steps, target, "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["nbytes"] == 0 and len(told["steps"]) == 5 and not told["committed"]


def test_prune(steps: Path, run: Run) -> None:
    before = contents_of(steps)
    code, out, _ = run("prune", steps, "--keep-last", 1, "--keep-best", 1, "--optimizer-last", 1)
    assert code == Code.FINE and "--yes" in out and contents_of(steps) == before
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("step-")}
    assert "no rule keeps it" in lines["step-000000100"] and "other steps reuse" in lines["step-000000100"]
    assert "best 1" in lines["step-000000300"] and "loses its optimizer" in lines["step-000000300"]
    assert "newest" in lines["step-000000500"]
    code, out, _ = run("prune", steps, "--keep-last", 1, "--keep-best", 1, "--optimizer-last", 1, "--yes", "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["done"]
    assert sorted(path.name for path in steps.glob("step-*")) == ["step-000000300", "step-000000500"]
    assert "optimizer/m" not in holdfast.open(steps / "step-000000300").tensors
    holdfast.tools.verify(steps / "step-000000300")
    holdfast.tools.verify(steps / "step-000000500")


def test_orphans(steps: Path, run: Run) -> None:
    assert "no orphans" in run("prune", steps, "--orphans")[1]
    code, _, err = run("prune", steps, "--orphans", "--keep-last", 1)
    assert code == Code.USAGE and "--orphans deletes no step" in err
    (steps / "step-000000500" / "manifest.json").unlink()
    code, out, _ = run("prune", steps, "--orphans")
    assert code == Code.FINE and "never committed" in out and "--yes" in out
    assert any((steps / "step-000000500").iterdir())
    code, out, _ = run("prune", steps, "--orphans", "--yes", "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["done"] and told["leavings"][0]["files"] == 4
    assert not (steps / "step-000000500").exists()
    holdfast.tools.verify(steps / "step-000000400")


def test_a_folder_is_not_called_like_a_file(steps: Path, run: Run) -> None:
    source, target = steps / "step-000000200", steps.parent / "w.safetensors"
    for options in ([], ["--model-only"], ["--to", "huggingface"]):
        code, _, err = run("convert", source, target, *options)
        assert code == Code.USAGE and f"{steps.parent / 'w' / 'model.safetensors'}" in err and not target.exists()
    for suffix in (".pt", ".pth", ".bin", ".ckpt"):
        target = steps.parent / f"w{suffix}"
        code, _, err = run("convert", source, target, "--to", "hf")
        assert code == Code.USAGE and '--to "torch"' in err and f"give {steps.parent / 'w'}," in err
        assert not target.exists()
    code, _, err = run("convert", source, target, "--to", "safetensors")
    assert code == Code.USAGE and "--to huggingface writes safetensors" in err


def test_the_command_and_python_take_the_same_names_of_formats(steps: Path) -> None:
    assert {one.value for one in Format} == set(FORMATS) == set(get_args(To))
    short, full = (holdfast.convert(steps / "step-000000200", steps.parent / to, to=to) for to in ("hf", "huggingface"))
    assert short.to == full.to == "huggingface" and short.tensors == full.tensors


def test_the_note_of_a_manager_is_not_exported(steps: Path, run: Run) -> None:
    target = steps.parent / "hf"
    assert json.loads(run("convert", steps / "step-000000200", target, "--to", "hf", "--json")[1])["beside"] == []
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
