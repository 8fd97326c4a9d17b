"""The rule of transformers: data, what it is made from, folders of other versions, and what it refuses."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.errors import Mismatch, Unsupported
from holdfast.remap import Remap, Rename
from holdfast.remap import transformers as map_of
from tests.programs import run_code
from tests.remap.arrangements import Tensors
from tests.remap.test_transformers import _no_noise, differences, files_in, leaves, made, problems, rule_of
from tests.remap.tiny_models import model_of

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors = pytest.importorskip("safetensors.torch")
__all__ = ["_no_noise"]


def folder_of(model: Any, folder: Any, change: Any = None) -> tuple[Path, Tensors]:
    """A folder that the model was saved to, its tensors under other names or of other kinds."""
    model.save_pretrained(Path(folder))
    files = {n: t.clone() for n, t in (change(files_in(Path(folder))) if change else files_in(Path(folder))).items()}
    safetensors.save_file(files, Path(folder) / "model.safetensors", {"format": "pt"})
    return Path(folder), files


def same_as_from_pretrained(one: Any, folder: Path, files: Tensors, **options: Any) -> Any:
    """Both ways: what the map makes of the folder, and what it makes of the loaded model."""
    model = one.from_pretrained(folder, **{"dtype": torch.float32, **options})
    assert not differences(made(map_of(model).resolve(leaves(files)), files), model.state_dict())
    model.save_pretrained(folder / "again")
    back = made(map_of(model).inverse().resolve(leaves(model.state_dict())), model.state_dict())
    assert not differences(back, files_in(folder / "again"))
    return model


def test_it_is_data() -> None:
    rule = rule_of(model_of("MixtralForCausalLM"))
    assert rule.architecture == "MixtralForCausalLM" and rule.config["num_local_experts"] == 4
    assert rule.inverse().inverse() == rule != rule.inverse()
    assert repr(rule).startswith("Transformers('MixtralForCausalLM', {") and len(repr(rule)) < 100
    remap = Remap((rule.inverse(), Rename("{*name}", "model.{*name}")))
    assert Remap.from_json(remap.to_json()) == remap
    assert remap.inverse().rules[1] == rule


def test_a_model_its_config_and_its_folder_give_one_map(tmp_path: Any) -> None:
    model = model_of("MixtralForCausalLM")
    rule = map_of(model)
    folder, _ = folder_of(model, tmp_path)
    assert map_of(folder) == map_of(str(folder)) == map_of(model.config) == rule
    assert map_of(transformers.AutoConfig.from_pretrained(folder)) == rule
    assert map_of(torch.compile(model)) == rule
    sharded = type(model)(model.config)
    sharded.__class__ = type("FSDPMixtralForCausalLM", (FSDPModule, type(model)), {})
    assert map_of(sharded) == rule


def test_a_class_of_ones_own_is_looked_up_among_those_that_are_loaded() -> None:
    class WithValue(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value = nn.Linear(config.hidden_size, 1)
            self.post_init()

    model = WithValue(model_of("LlamaForCausalLM").config)
    rule = rule_of(model)
    assert rule.architecture.endswith("<locals>.WithValue")
    state = model.state_dict()
    assert rule.inverse().resolved(leaves(state)).nodes.keys() == state.keys()
    assert not differences(made(rule.resolved(leaves(state)).nodes, state), state)
    with pytest.raises(Unsupported, match="no model class elsewhere:Model: import its module"):
        msgspec.structs.replace(rule, architecture="elsewhere:Model").resolved({})


def test_what_was_added_to_a_model_is_saved_with_it() -> None:
    model = model_of("MixtralForCausalLM")
    model.value = nn.Linear(16, 1)
    state = model.state_dict()
    back = map_of(model).inverse().resolve(leaves(state))
    assert {"value.weight", "value.bias", "model.layers.0.block_sparse_moe.experts.3.w1.weight"} <= back.keys()


def test_old_names(tmp_path: Any) -> None:
    def older(files: Tensors) -> Tensors:
        return {
            n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for n, t in files.items()
        }

    folder, files = folder_of(model_of("BertForMaskedLM"), tmp_path, older)
    model = same_as_from_pretrained(transformers.BertForMaskedLM, folder, files)
    assert rule_of(model).used


@pytest.mark.parametrize(
    "saved, wanted",
    [("BertModel", "BertForMaskedLM"), ("BertForMaskedLM", "BertModel"), ("MixtralForCausalLM", "MixtralModel")],
)
def test_with_and_without_a_head(saved: str, wanted: str, tmp_path: Any) -> None:
    folder, files = folder_of(model_of(saved), tmp_path)
    one = getattr(transformers, wanted)
    resolved = rule_of(one(model_of(saved).config)).resolved(leaves(files))
    model, info = one.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert {*resolved.missing} == info["missing_keys"] and {*resolved.unexpected} == info["unexpected_keys"]
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in info["missing_keys"]}
    there = made(resolved.nodes, files)
    assert not differences(there, {name: state[name] for name in there})
    assert all(name.startswith("cls.") for name in state.keys() - there.keys())  # tied to each other, and missing


def test_names_that_the_user_maps(tmp_path: Any) -> None:
    def renamed(files: Tensors) -> Tensors:
        return {name.replace("model.layers", "model.blocks"): tensor for name, tensor in files.items()}

    folder, files = folder_of(model_of("LlamaForCausalLM"), tmp_path, renamed)
    same_as_from_pretrained(
        transformers.LlamaForCausalLM, folder, files, key_mapping={r"^model\.blocks": "model.layers"}
    )


def test_tied_tensors(tmp_path: Any) -> None:
    config = model_of("LlamaForCausalLM").config
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config)
    _, files = folder_of(model, tmp_path)
    rule = map_of(model)
    assert "lm_head.weight" not in files
    nodes = rule.resolve(leaves(files))
    assert nodes["lm_head.weight"] is nodes["model.embed_tokens.weight"]
    state = model.state_dict()
    assert rule.inverse().resolve(leaves(state)).keys() == files.keys()
    either = {name: node for name, node in leaves(state).items() if name != "model.embed_tokens.weight"}
    assert rule.inverse().resolve(either).keys() == files.keys()
    state["lm_head.weight"] = state["lm_head.weight"].clone()  # no longer one tensor: none of both may be lost
    assert rule.inverse().resolve(leaves(state)).keys() == {*files, "lm_head.weight"}


def test_missing_and_unexpected_names(tmp_path: Any) -> None:
    model = model_of("MixtralForCausalLM")
    _, files = folder_of(model, tmp_path)
    files["model.layers.9.extra"] = files.pop("model.norm.weight")
    resolved = rule_of(model).resolved(leaves(files))
    assert resolved.missing == ["model.norm.weight"] and resolved.unexpected == ["model.layers.9.extra"]
    assert resolved.nodes.keys() == model.state_dict().keys() - {"model.norm.weight"}


def test_what_is_no_model_stays_as_it_is() -> None:
    others = leaves({"step": torch.zeros(1), "state.weight": torch.zeros(2)})
    rule = rule_of(model_of("MixtralForCausalLM"))
    assert rule.resolved(others).nodes == rule.inverse().resolved(others).nodes == others


def test_an_optimizer_knows_a_tied_parameter_by_one_name(tmp_path: Any) -> None:
    model = model_of("GPT2LMHeadModel")
    _, files = folder_of(model, tmp_path)
    names = {name for name, _ in model.named_parameters()}
    assert map_of(model, dtype="bfloat16").resolve(leaves(files), moments=True).keys() == names
    moments = {name: tensor for name, tensor in leaves(model.state_dict()).items() if name in names}
    assert map_of(model).inverse().resolve(moments, moments=True).keys() == files.keys()


def test_dtypes(tmp_path: Any) -> None:
    model = model_of("MixtralForCausalLM")
    folder, files = folder_of(model, tmp_path)
    assert {node.dtype for node in map_of(model).resolve(leaves(files)).values()} == {"float32"}
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    nodes = map_of(model, dtype="bfloat16").resolve(leaves(files))
    assert {name: node.dtype for name, node in nodes.items()} == {n: str(t.dtype)[6:] for n, t in half.items()}
    assert rule_of(folder, dtype="auto").dtype == "float32"
    with pytest.raises(Mismatch, match="is not a floating dtype of torch"):
        map_of(model, dtype="fp8")


def test_what_does_not_fit_is_named(tmp_path: Any) -> None:
    model = model_of("MixtralForCausalLM")
    _, files = folder_of(model, tmp_path)
    files["lm_head.weight"] = files["lm_head.weight"][:30]
    with pytest.raises(Mismatch, match=r"lm_head.weight: \[30, 16\], the config has \[32, 16\]"):
        map_of(model).resolve(leaves(files))
    files = {name: tensor for name, tensor in files.items() if "experts.3.w1" not in name}
    with pytest.raises(
        Mismatch, match=r"experts.1.w3.weight and 2 more .* cannot be concatenated with .*experts.0.w1.weight"
    ):
        map_of(model).resolve(leaves(files))


class Doubled:
    """A conversion that computes."""

    supports_many_to_many = False

    def convert(self, tensors: Any, **_: Any) -> Any:
        return {name: [tensor * 2 for tensor in list_] for name, list_ in tensors.items()}

    @property
    def reverse_op(self) -> Doubled:
        return self


def test_a_conversion_that_computes_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    double = [WeightConverter("model.norm.weight", "model.norm.weight", [Doubled()])]
    conversions = {"llama": double, "legacy": []}
    model = model_of("LlamaForCausalLM")
    _, files = folder_of(model, tmp_path)
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", conversions.get)
    for rule in (map_of(model), map_of(model).inverse()):
        with pytest.raises(Unsupported, match=r"aten.mul.* on model.norm.weight \(float32 \[16\]\) computes elements"):
            rule.resolve(leaves(files))


def test_what_it_cannot_be_made_from() -> None:
    config = model_of("LlamaForCausalLM").config
    with pytest.raises(Unsupported, match="Linear is not a model of transformers, nor a config"):
        map_of(nn.Linear(1, 1))  # type: ignore[arg-type]
    config.architectures = None
    with pytest.raises(Mismatch, match="names 0 architectures, and the map needs one"):
        map_of(config)
    config.architectures = ["LlamaForCausalLM"]
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(Unsupported, match="LlamaForCausalLM is quantized"):
        map_of(config)


def fused(folder: Path) -> None:
    from transformers.fusion_mapping import register_fusion_patches
    from transformers.monkey_patching import apply_patches
    from transformers.utils.import_utils import _LazyModule

    # Patching asks packages for all their names each time: thousands, each of which is looked up in a list.
    _LazyModule.__dir__ = functools.cache(_LazyModule.__dir__)  # type: ignore[method-assign]
    one = transformers.Qwen2VLForConditionalGeneration
    config = model_of("Qwen2VLForConditionalGeneration").config
    config.fusion_config = {"patch_embeddings": True}
    register_fusion_patches(one, config, config.fusion_config)
    with apply_patches():
        model = one(config)
    assert "model.visual.patch_embed.linear_proj.weight" in model.state_dict()
    assert not problems(model, folder)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its transformers imports torchvision for these models")
@pytest.mark.slow
def test_modules_that_transformers_fuses(tmp_path: Any) -> None:
    """In a process of its own: transformers notes them for all models to come."""
    ended = run_code(f"import pathlib, sys; from {__name__} import fused; fused(pathlib.Path(sys.argv[1]))", tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_proof_of_a_map(tmp_path: Any) -> None:
    mixtral, gpt2 = model_of("MixtralForCausalLM"), model_of("GPT2LMHeadModel")
    _, files = folder_of(mixtral, tmp_path)
    assert map_of(mixtral).check(files, mixtral.state_dict()).is_exact
    assert map_of(mixtral).inverse().check(mixtral.state_dict(), files).is_exact
    _, files = folder_of(gpt2, tmp_path)
    assert map_of(gpt2).check(files, gpt2.state_dict()).repeated == ("transformer.wte.weight",)
    with pytest.raises(Mismatch, match="model.embed_tokens.weight is not made"):
        map_of(mixtral).check(files, mixtral.state_dict())
    more = {**files, "extra": torch.zeros(1)}
    assert map_of(gpt2).check(more, gpt2.state_dict()).left_over == ("extra",)


def test_no_random_number_is_drawn_and_no_default_changes(tmp_path: Any) -> None:
    model = model_of("MixtralForCausalLM")
    _, files = folder_of(model, tmp_path)
    before, config = torch.get_rng_state(), model.config.to_dict()
    made(map_of(model, dtype="bfloat16").resolve(leaves(files)), files)
    map_of(model).inverse().resolve(leaves(model.state_dict()))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert model.config.to_dict() == config and model.tie_weights.__name__ == "tie_weights"


@pytest.mark.slow
def test_transformers_is_imported_when_it_is_needed() -> None:
    code = "import sys, holdfast.remap; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_progress_bar_is_as_before(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of("LlamaForCausalLM")
    _, files = folder_of(model, tmp_path)
    transformers.logging.enable_progress_bar()
    capfd.readouterr()
    map_of(model).resolve(leaves(files))
    assert capfd.readouterr().err == "" and transformers.logging.is_progress_bar_enabled()
