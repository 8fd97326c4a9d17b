"""Conversions to Hugging Face's format: what `transformers` and `safetensors` make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import holdfast
from tests.export import states

transformers = pytest.importorskip("transformers")


def gpt2() -> Any:
    """A tiny model whose embedding and head are one tensor."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    """A tiny model without tied tensors."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        vocab_size=101, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def saved(model: Any, path: Path) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer, "step": 3}, path)
    return path


def loaded(path: Path, **options: Any) -> Any:
    """What `from_pretrained` makes of a folder, and nothing may be missing or left over."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    return model.eval()


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("limit", [20_000, 5_000_000_000], ids=["sharded", "one file"])
def test_transformers_loads_it(make: Any, limit: int, tmp_path: Path) -> None:
    model = make()
    source = saved(model, tmp_path / "c")
    (tmp_path / "config").mkdir()
    model.config.save_pretrained(tmp_path / "config")
    (tmp_path / "config" / "tokenizer.json").write_text("{}")
    (tmp_path / "config" / "pytorch_model.bin").write_bytes(b"old weights")
    converted = holdfast.convert(
        source, tmp_path / "hf", to="huggingface", max_shard_bytes=limit, extras=tmp_path / "config"
    )
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}", "what lies beside the weights is carried over"
    assert not (tmp_path / "hf" / "pytorch_model.bin").exists(), "weights are not"
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert (len(shards) > 2) == (limit < 1_000_000)
    again = loaded(tmp_path / "hf")
    states.same(dict(again.state_dict()), dict(model.state_dict()))
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert converted.left_out and all(name.startswith(("optimizer/", "step")) for name in converted.left_out)
    assert converted.tied == ({"lm_head.weight": "transformer.wte.weight"} if make is gpt2 else {})


def test_cast_to_bfloat16(tmp_path: Path) -> None:
    model = llama()
    source = saved(model, tmp_path / "c")
    converted = holdfast.convert(
        source, tmp_path / "hf", to="huggingface", dtype=torch.bfloat16,
        extras={"config.json": model.config.to_json_string().encode()},
    )  # fmt: skip
    again = loaded(tmp_path / "hf", dtype=torch.bfloat16)
    states.same(dict(again.state_dict()), dict(model.bfloat16().state_dict()))
    assert set(converted.cast.values()) == {("float32", "bfloat16")}


def test_the_index_is_the_one_that_transformers_writes(tmp_path: Path) -> None:
    """The same names in shards, the same sizes in all; which shard holds what is each writer's choice."""
    model = llama()
    holdfast.convert(saved(model, tmp_path / "c"), tmp_path / "ours", to="huggingface", max_shard_bytes=20_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("ours", "theirs")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    for name in set(ours["weight_map"].values()):
        with safe_open(tmp_path / "ours" / name, "pt") as shard:
            assert shard.metadata()["format"] == "pt"
            held = list(shard.keys())
            assert held and all(ours["weight_map"][key] == name for key in held)
            assert sum(shard.get_tensor(key).nbytes for key in held) <= 20_000 or len(held) == 1


def test_names_by_a_table_or_a_function(source: Path, tmp_path: Path) -> None:
    holdfast.convert(
        source, tmp_path / "table", to="huggingface", only="model", rename={"rows": "body.rows", "seen": "count"}
    )
    table = load_file(tmp_path / "table" / "model.safetensors")
    assert set(table) == {"emb.weight", "norm.bias", "none.weight", "count", "body.rows.weight"}
    assert torch.equal(table["body.rows.weight"], states.wide(0))
    holdfast.convert(source, tmp_path / "function", to="huggingface", rename=lambda name: f"m.{name}")
    assert set(load_file(tmp_path / "function" / "model.safetensors")) == {
        "m.emb.weight", "m.norm.bias", "m.none.weight", "m.seen", "m.rows.weight",
    }  # fmt: skip
    with pytest.raises(holdfast.errors.Mismatch, match=r"rename= gives model/emb\.weight and .* the same name x"):
        holdfast.convert(source, tmp_path / "x", to="huggingface", rename=lambda name: "x")
    with pytest.raises(holdfast.errors.Mismatch, match="rename= makes '' of"):
        holdfast.convert(source, tmp_path / "x", to="huggingface", rename=lambda name: "")
    assert not list(tmp_path.glob("x*"))


def test_a_leading_path_is_dropped_whole_and_a_rename_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    holdfast.save({"model": {"net": {"layers": torch.ones(2)}, "head": torch.zeros(2)}}, tmp_path / "c")
    done = holdfast.convert(tmp_path / "c", tmp_path / "hf", to="huggingface", rename={"net": ""})
    assert set(done.tensors) == set(load_file(tmp_path / "hf" / "model.safetensors")) == {"layers", "head"}
    done = holdfast.convert(tmp_path / "c", tmp_path / "ours", rename={"model": ""})
    assert set(done.tensors) == {"net/layers", "head"}
    done = holdfast.convert(
        tmp_path / "c", tmp_path / "part", only="model/head", rename={"model": "", "model/net": "x"}
    )
    assert done.tensors == ["head"], "a table may map what is not taken"
    for wrong, to in (("model/net", "huggingface"), ("ne", "huggingface"), ("net", "holdfast")):
        with pytest.raises(
            holdfast.errors.Mismatch, match=f"rename= maps '{wrong}'.*, but no name .* as in '(model/)?net"
        ):
            holdfast.convert(tmp_path / "c", tmp_path / "x", to=to, rename={wrong: "other"})  # type: ignore[arg-type]


def test_a_folder_without_a_config_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    done = holdfast.convert(tmp_path / "c", tmp_path / "x", to="huggingface", extras={"config.json": b"{}"})
    assert not done.lacks_config and "config.json" not in caplog.text
    done = holdfast.convert(tmp_path / "c", tmp_path / "y", to="huggingface", extras={"tokenizer.json": b"{}"})
    assert done.lacks_config and done.beside == ["tokenizer.json"]
    assert f"{tmp_path / 'y'} has no config.json, without which from_pretrained loads nothing" in caplog.text


def test_what_is_attached_goes_along_and_what_is_given_goes_before(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "hf", to="huggingface", extras={"config.json": b"{}"})
    found = {name: data for name, data in states.files(tmp_path / "hf").items() if "safetensors" not in name}
    assert found == {"config.json": b"{}", "tokenizer/merges.txt": b"a b"}
    with pytest.raises(holdfast.errors.Mismatch, match=r"model\.safetensors is written by the conversion"):
        holdfast.convert(source, tmp_path / "x", to="huggingface", extras={"model.safetensors": b""})
    with pytest.raises(holdfast.errors.Unsupported, match="must be a relative path"):
        holdfast.convert(source, tmp_path / "x", to="huggingface", extras={"../config.json": b""})
    with pytest.raises(holdfast.errors.StorageError, match=r"there is nothing at extras=.*nowhere\.json"):
        holdfast.convert(source, tmp_path / "x", to="huggingface", extras=tmp_path / "nowhere.json")
    assert not list(tmp_path.glob("x*"))


def test_which_tensors_are_the_model(tmp_path: Path) -> None:
    one, two = {"w": torch.ones(2)}, {"x.y": {"w": torch.zeros(3)}}
    holdfast.save({"ema": one, "other": two}, tmp_path / "two")
    with pytest.raises(
        holdfast.errors.Mismatch, match="has no section model, but tensors in ema, other: say which .* only="
    ):
        holdfast.convert(tmp_path / "two", tmp_path / "x", to="huggingface")
    for only, keys in [("ema", {"w"}), ("other", {"x.y.w"}), ("other/x.y", {"w"})]:
        holdfast.convert(tmp_path / "two", tmp_path / "hf", to="huggingface", only=only, overwrite=True)
        assert set(load_file(tmp_path / "hf" / "model.safetensors")) == keys
    holdfast.save({"top.w": torch.ones(2), "n": 1}, tmp_path / "bare")
    converted = holdfast.convert(tmp_path / "bare", tmp_path / "hf", to="huggingface", overwrite=True)
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"top.w"} and converted.left_out == ["n"]
    with pytest.raises(holdfast.errors.Mismatch, match="has no tensors that fit only='n'"):
        holdfast.convert(tmp_path / "bare", tmp_path / "x", to="huggingface", only="n")


def test_dtypes(source: Path, tmp_path: Path) -> None:
    state = {"model": states.small()["kinds"]}
    holdfast.save(state, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "hf", to="huggingface")
    states.same(load_file(tmp_path / "hf" / "model.safetensors"), state["model"])
    holdfast.save({"model": {"w": torch.ones(2, dtype=torch.complex128)}}, tmp_path / "odd")
    with pytest.raises(holdfast.errors.Unsupported, match="w is complex128, which safetensors cannot name"):
        holdfast.convert(tmp_path / "odd", tmp_path / "x", to="huggingface")
