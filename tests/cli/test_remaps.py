"""Maps on the command line: how they are named, what `show` says of them, and conversions by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.cli.errors import Code
from holdfast.cli.remaps import map_of
from holdfast.remap import Cast, Constant, Drop, Remap, Split
from tests.cli.conftest import Run
from tests.remap.models import HUB_TO_NATIVE, Hub, Native, translated
from tests.remap.test_loads import same, trained


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model as a hub has it, with a map beside it."""
    torch.manual_seed(0)
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(Hub().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "none of transformers"}')
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "map.json").write_text(HUB_TO_NATIVE.to_json())
    return folder


@pytest.fixture
def native(tmp_path: Path, hub: Path) -> Path:
    """The same weights in the other layout, with an optimizer."""
    model = Native()
    model.load_state_dict(translated(load_file(hub / "model.safetensors")))
    holdfast.save({"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 3}, tmp_path / "native")
    return tmp_path / "native"


def test_a_map_is_named_by_its_file(tmp_path: Path, hub: Path) -> None:
    text = str(tmp_path / "map.json")
    assert map_of(None) is None
    assert map_of(text) == HUB_TO_NATIVE and map_of(f"{text}:inverse") == HUB_TO_NATIVE.inverse()
    assert map_of(f"file://{text}") == HUB_TO_NATIVE


def test_what_is_no_map(run: Run, tmp_path: Path, hub: Path) -> None:
    (tmp_path / "odd.json").write_text('{"version": 1, "rules": [{"type": "melt"}]}')
    (tmp_path / "drop.json").write_text(Remap([Drop("norm.{w}")]).to_json())
    for text, said, code in (
        ("nothing.json", "there is no such file; a map is a JSON file, or transformers:FOLDER", Code.USAGE),
        (str(hub), f"is a folder: write transformers:{hub}", Code.USAGE),
        (f"transformers:{tmp_path}", f"there is no config.json in {tmp_path}", Code.USAGE),
        (str(tmp_path / "odd.json"), "odd.json: this is no map of holdfast.remap", Code.MISMATCH),
        (f"{tmp_path / 'drop.json'}:inverse", "has no inverse", Code.MISMATCH),
    ):
        for words in (["show", hub], ["diff", hub, hub], ["convert", hub, tmp_path / "out"]):
            found, out, err = run(*words, "--remap", text)
            assert (found, out) == (code, "") and said in err.replace("\n", " "), err
    assert not (tmp_path / "out").exists()


def test_show(run: Run, tmp_path: Path, hub: Path) -> None:
    code, out, err = run("show", hub, "--remap", tmp_path / "map.json")
    assert (code, err) == (Code.FINE, "")
    lines = {line.split()[0]: line for line in reversed(out.splitlines()) if line.strip()}
    assert lines["tensor"].split() == ["tensor", "type", "bytes", "from"]
    assert lines["gate_up"].endswith("×2          49.2 KB   0.w1.weight, 1.w1.weight and 6 more")
    assert lines["weight"].endswith("q_proj.weight, k_proj.weight and 1 more")
    assert "embed.weight" in lines["tok.weight"] and "itself" in out
    assert out.splitlines()[-1] == "the map puts in several places: 1 (model/embed.weight)"

    rules = [*HUB_TO_NATIVE.rules, Drop("norm.bias"), Constant("scale", (2,)), Cast("norm.weight", "bfloat16")]
    (tmp_path / "more.json").write_text(Remap(rules, HUB_TO_NATIVE.values).to_json())
    out = run("show", hub, "--remap", tmp_path / "more.json", "--tensors", "*scale")[1]
    rows = [line.split() for line in out.splitlines()]
    assert ["tensor", "type", "bytes", "cut", "from"] in rows
    assert ["model/scale", "float32", "[2]", "8", "B", "made", "up", "made", "up"] in rows
    assert "the map leaves over, so that it is not there: 1 (model/norm.bias)" in out
    assert "the map makes up elements of: 1 (model/scale)" in out
    assert "the map casts, which may round: 1 (model/norm.weight)" in out

    answer = json.loads(run("show", hub, "--remap", tmp_path / "more.json", "--json")[1])
    tensors = {tensor["name"]: tensor for tensor in answer["tensors"]}
    assert tensors["model/layers.0.qkv.bias"]["from"] == [f"model/layers.0.{x}_proj.bias" for x in "qkv"]
    assert tensors["model/head.weight"]["tied"] == "model/tok.weight" and tensors["model/scale"]["from"] == []
    assert answer["map"]["left_over"] == ["model/norm.bias"]
    out = run("show", hub, "--remap", tmp_path / "map.json", "--layout", "--tensors", "*0.qkv.bias")[1]
    assert "model/layers.0.v_proj.bias[0:16]" in out and "made of 3 tensors, 1 file" in out
    assert "mean" in run("show", hub, "--remap", tmp_path / "map.json", "--stats")[1]


def test_a_map_that_moves_everything(run: Run, tmp_path: Path, hub: Path) -> None:
    (tmp_path / "exact.json").write_text(Remap(HUB_TO_NATIVE.rules[:-1], HUB_TO_NATIVE.values).to_json())
    out = run("show", hub, "--remap", tmp_path / "exact.json")[1]
    assert out.splitlines()[-1] == "the map moves every element of the checkpoint to one place, and makes none up"


def test_moments_and_their_steps_are_no_loss(run: Run, tmp_path: Path, native: Path) -> None:
    model = Native()
    holdfast.save({"model": model, "optim": trained(model)}, tmp_path / "trained")
    answer = json.loads(run("show", tmp_path / "trained", "--remap", f"{tmp_path / 'map.json'}:inverse", "--json")[1])
    assert answer["map"]["left_over"] == answer["map"]["made_up"] == []
    hub = Hub()
    optimizer = trained(hub)
    holdfast.save({"model": hub, "optim": optimizer}, tmp_path / "other")
    answer = json.loads(run("show", tmp_path / "other", "--remap", tmp_path / "map.json", "--json")[1])
    assert answer["map"]["left_over"] == answer["map"]["made_up"] == []


def test_sizes_and_meshes(run: Run, tmp_path: Path, hub: Path, native: Path) -> None:
    under = ["--remap", tmp_path / "map.json", "--json"]
    sizes = json.loads(run("show", hub, "--sizes", *under)[1])
    assert sizes["tensors"] == holdfast.inspect.usage.usage(holdfast.open(native), only="model").tensors
    planned = json.loads(run("show", hub, "--mesh", "fsdp=2", *under)[1])
    plain = json.loads(run("show", native, "--mesh", "fsdp=2", "--tensors", "model", "--json")[1])
    assert [rank["needed"] for rank in planned["ranks"]] == [rank["needed"] for rank in plain["ranks"]]
    assert not planned["shares"] and planned["read"] >= planned["needed"]
    code, _, err = run("show", tmp_path, "--sizes", *under)
    assert code != Code.FINE and "--remap" in err


def test_diff(run: Run, tmp_path: Path, hub: Path, native: Path) -> None:
    words = ["diff", hub, native, "--tensors", "model", "--remap", tmp_path / "map.json"]
    code, out, _ = run(*words)
    assert code == Code.FINE and out.startswith("the same, to the last bit")
    assert run(*words, "--names-only")[0] == Code.FINE
    code, out, _ = run("diff", hub, native, "--tensors", "model")
    assert code == Code.DIFFERENT and "only in the first" in out
    assert run("diff", native, hub, "--tensors", "model", "--remap", f"{tmp_path / 'map.json'}:inverse")[0] == Code.FINE


def test_convert_by_a_map(run: Run, tmp_path: Path, hub: Path, native: Path) -> None:
    words = ["convert", native, tmp_path / "out", "--to", "hf", "--remap", f"{tmp_path / 'map.json'}:inverse"]
    code, out, err = run(*words, "--extras", hub)
    assert code == Code.FINE and "- the map moves every element" in out, err
    assert same(load_file(tmp_path / "out/model.safetensors"), load_file(hub / "model.safetensors"))
    code, _, err = run("convert", native, tmp_path / "x", "--remap", tmp_path / "map.json")
    assert code == Code.MISMATCH and "two tensors would be called head.weight" in err
    code, _, err = run("convert", "--merge", hub, hub, tmp_path / "x", "--remap", tmp_path / "map.json")
    assert code == Code.USAGE and "--remap and --like take one source" in err


def test_convert_like_a_model_whose_names_it_has(run: Run, tmp_path: Path, hub: Path) -> None:
    model = Hub()
    holdfast.save({"model": model, "optim": trained(model), "step": 3}, tmp_path / "c")
    code, out, err = run("convert", tmp_path / "c", tmp_path / "out", "--like", hub)
    assert code == Code.FINE, err
    assert "put beside: 2 (config.json, tokenizer.json)" in out and "the map" not in out
    assert same(load_file(tmp_path / "out/model.safetensors"), model.state_dict())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("mine")
    assert (
        run("convert", tmp_path / "c", tmp_path / "own", "--like", hub, "--extras", tmp_path / "mine")[0] == Code.FINE
    )
    assert (tmp_path / "own/config.json").read_text() == "mine" and (tmp_path / "own/tokenizer.json").exists()


def test_convert_like_a_folder_without_weights(run: Run, tmp_path: Path, native: Path) -> None:
    (tmp_path / "base-model").mkdir()
    (tmp_path / "base-model" / "config.json").write_text("{}")
    code, _, err = run("convert", native, tmp_path / "out", "--like", tmp_path / "base-model")
    assert code == Code.NOT_A_CHECKPOINT and "has a config.json and no weights: --like needs a model's weights" in err
    assert err.splitlines()[-1] == "next:  give a folder with config.json and the model's safetensors files"


def test_extras_that_are_not_there(run: Run, tmp_path: Path, native: Path) -> None:
    (tmp_path / "base-model").mkdir()
    code, _, err = run("convert", native, tmp_path / "out", "--to", "hf", "--extras", tmp_path / "base-modle")
    assert code == Code.STORAGE and "/base-modle' (did you mean base-model?)" in err
    assert f"there is nothing at --extras '{tmp_path}" in err and "next:  give a file or a folder that is there" in err


def test_convert_like_a_model_with_a_map(run: Run, tmp_path: Path, hub: Path, native: Path) -> None:
    words = ["convert", native, tmp_path / "out", "--like", hub]
    code, out, err = run(*words)
    assert (code, out) == (Code.MISMATCH, "") and not (tmp_path / "out").exists()
    assert "the source lacks: " in err and " more\n    the model lacks: tok.weight, " in err
    assert "and the map of transformers cannot be used" in err and "give a map with --remap MAP" in err
    assert run(*words, "--remap", f"{tmp_path / 'map.json'}:inverse")[0] == Code.FINE
    assert same(load_file(tmp_path / "out/model.safetensors"), load_file(hub / "model.safetensors"))
    short = Remap([r for r in HUB_TO_NATIVE.inverse().rules if not isinstance(r, Split)], HUB_TO_NATIVE.values)
    (tmp_path / "short.json").write_text(short.to_json())
    code, _, err = run("convert", native, tmp_path / "no", "--like", hub, "--remap", tmp_path / "short.json")
    assert code == Code.MISMATCH and "the map does not fit: correct it" in err
    assert run("convert", native, tmp_path / "no", "--like", hub, "--rename", "a=b")[0] == Code.USAGE


def test_convert_like_a_checkpoint_of_ours(run: Run, tmp_path: Path, hub: Path, native: Path) -> None:
    """Names and shapes of the other, in holdfast's format; a tied name that it lacks is left out."""
    words = ["--like", native, "--remap", tmp_path / "map.json", "--only", "model"]
    code, _, err = run("convert", hub, tmp_path / "out", *words)
    assert code == Code.FINE, err
    first, second = holdfast.open(tmp_path / "out"), holdfast.open(native)
    assert same(first.state_dict("model")["model"], second.state_dict("model")["model"])
    untied = {name: tensor for name, tensor in second.state_dict("model")["model"].items() if name != "head.weight"}
    holdfast.save({"model": untied}, tmp_path / "untied")
    assert run("convert", native, tmp_path / "less", "--like", tmp_path / "untied", "--only", "model")[0] == Code.FINE
    assert same(holdfast.open(tmp_path / "less").state_dict()["model"], untied)


def test_convert_like_a_model_of_transformers(run: Run, tmp_path: Path) -> None:
    """A checkpoint of the live model, in a folder from which `from_pretrained` loads the same."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tests.remap.tiny_models import model_of

    base = model_of("MixtralForCausalLM")
    base.save_pretrained(tmp_path / "base")
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    holdfast.save({"model": model, "optim": trained(model), "step": 1}, tmp_path / "trained")
    code, out, err = run("convert", tmp_path / "trained", tmp_path / "out", "--like", tmp_path / "base")
    assert code == Code.FINE, err
    assert "- the map moves every element" in out and "config.json" in out
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "base/model.safetensors").keys()
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out")
    assert same(again.state_dict(), model.state_dict())
    text = f"transformers:{tmp_path / 'base'}"
    assert run("diff", tmp_path / "out", tmp_path / "trained", "--tensors", "model", "--remap", text)[0] == Code.FINE
    words = ["diff", tmp_path / "trained", tmp_path / "out", "--tensors", "model", "--remap", f"{text}:inverse"]
    assert run(*words)[0] == Code.FINE
