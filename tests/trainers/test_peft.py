"""Real models of transformers, with adapters of peft and without: saved, cited, converted, loaded by both libraries."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import holdfast
from holdfast.errors import Mismatch
from holdfast.trainers.peft import export_adapter
from tests import pool

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.arange(16).view(2, 8) % 64
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def model_of(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()
    if kind == "gpt2":  # its head is tied to its embedding
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "mixtral"])
@pytest.mark.fast_cases("llama", "tied")
def test_a_saved_model_is_loaded_by_transformers(tmp_path, kind):
    model = model_of(kind)
    holdfast.save({"model": model, "step": 3}, tmp_path / "saved")
    model.config.architectures = [type(model).__name__]
    done = holdfast.convert(
        tmp_path / "saved", tmp_path / "hf", to="huggingface", max_shard_bytes=8_000,
        extras={"config.json": model.config.to_json_string().encode()},
    )  # fmt: skip
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert bool(done.tied) == (kind in ("tied", "gpt2"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), logits(model))


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_a_folder_of_transformers_is_loaded_into_a_model(tmp_path, kind):
    model, other = model_of(kind), model_of(kind, seed=1)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    holdfast.load(tmp_path, {"model": other})
    assert torch.equal(logits(other), logits(model))


def load_sharded(folder):
    model = model_of("llama", seed=1)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    holdfast.load(folder, {"model": model})
    return float((logits(model) - logits(model_of("llama"))).abs().max())


@pytest.mark.slow
def test_and_into_one_that_is_sharded(tmp_path):
    model_of("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    assert pool.run(2, load_sharded, str(tmp_path)) == [0.0, 0.0]


def adapted(kind, **options):
    chosen = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    torch.manual_seed(1)
    return get_peft_model(model_of(kind), LoraConfig(**chosen)).eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
)
def test_an_adapter_is_handed_on_alone(tmp_path, kind, options):
    model = adapted(kind, **options)
    holdfast.save({"model": model}, tmp_path / "saved")
    with torch.device("meta"):
        shape = adapted(kind, **options)
    read = export_adapter(tmp_path / "saved", tmp_path / "adapter", shape)
    assert all("default" in name for name in read)
    again = PeftModel.from_pretrained(model_of(kind), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(model_of(kind)), logits(model))


def test_an_adapter_that_is_not_there_is_named(tmp_path):
    holdfast.save({"model": model_of("llama")}, tmp_path / "saved")
    with pytest.raises(Mismatch, match="no tensors of an adapter 'default'"):
        export_adapter(tmp_path / "saved", tmp_path / "adapter", adapted("llama"))
    with pytest.raises(Mismatch, match="no adapter 'other'"):
        export_adapter(tmp_path / "saved", tmp_path / "adapter", adapted("llama"), adapter="other")
    assert not (tmp_path / "adapter").exists()


def run_example(root, *options):
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("lora_example", EXAMPLES / "lora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([f"--root={root}", *options])


@pytest.mark.slow
def test_frozen_weights_are_written_once_and_two_ranks_go_on_on_three(tmp_path):
    whole = pool.run(2, run_example, str(tmp_path / "run"), "--steps=6")[0]
    assert whole["resumed"] == 0
    first, second = (holdfast.open(tmp_path / "run" / f"step-00000000{step}") for step in (3, 6))
    own = sum(
        file.stat().st_size for file in second.path.rglob("*") if file.is_file() and file.stat().st_nlink == 1
    )  # those with more links are the first step's too
    assert own < first.nbytes / 2
    resumed = pool.run(3, run_example, str(tmp_path / "run"), "--steps=8")[0]
    assert resumed["resumed"] == 6 and sorted(resumed["losses"]) == [7, 8]
    straight = pool.run(3, run_example, str(tmp_path / "straight"), "--steps=8")[0]
    for step in (7, 8):
        assert resumed["losses"][step] == pytest.approx(straight["losses"][step], rel=1e-4)
