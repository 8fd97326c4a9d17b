"""Hub folders into live models, whole and sharded, and checkpoints into hub folders, by the maps of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import Mismatch
from holdfast.remap import transformers as map_of
from tests import pool
from tests.remap.test_transformers import FAST, NAMES, _no_noise, differences, files_in
from tests.remap.tiny_models import model_of

transformers = pytest.importorskip("transformers", minversion="5.0")
__all__ = ["_no_noise"]


def other_than(model: Any) -> Any:
    """The same model with other values."""
    other = type(model)(model.config)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1) if tensor.is_floating_point() else None
    return other


@pytest.mark.fast_cases(*FAST)
@pytest.mark.parametrize("name", NAMES)
def test_load_and_convert(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    hub, checkpoint, out = tmp_path / "hub", tmp_path / "checkpoint", tmp_path / "out"
    model.save_pretrained(hub)
    other = other_than(model)
    holdfast.load(hub, {"model": other}, remap=map_of(model))
    assert not differences(other.state_dict(), model.state_dict())

    holdfast.save({"model": other, "step": 3}, checkpoint)
    back = map_of(model).inverse()
    holdfast.convert(checkpoint, out, to="huggingface", only="model", remap=back, extras=hub)
    assert not differences(files_in(out), files_in(hub))
    third = type(model).from_pretrained(out, dtype=torch.float32)
    assert not differences(third.state_dict(), model.state_dict())


def sharded_model(name: str) -> Any:
    model = other_than(model_of(name))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                if sum(1 for _ in layer.parameters()) and type(layer).__name__.endswith(("Layer", "Block")):
                    fully_shard(layer, mesh=mesh)
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}  # FSDP2 takes none
    fully_shard(model, mesh=mesh, ignored_params=scalars)
    return model


def on_a_rank(name: str, hub: str, folder: str) -> list[str]:
    """Load into FSDP2, save, convert, and convert without a save, all with maps of the sharded model."""
    transformers.logging.set_verbosity_error()
    wanted = model_of(name).state_dict()
    model = sharded_model(name)
    assert type(model).__name__.startswith("FSDP")
    remap = map_of(model)
    holdfast.load(hub, {"model": model}, remap=remap)
    lines = differences(
        {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}, wanted
    )
    holdfast.save({"model": model}, f"{folder}/checkpoint")
    options = {"to": "huggingface", "remap": remap.inverse(), "extras": hub}
    holdfast.convert(f"{folder}/checkpoint", f"{folder}/out", only="model", **options)
    holdfast.convert({"model": model}, f"{folder}/live", **options)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sharded(name: str, tmp_path: Path) -> None:
    """Two ranks of FSDP2: each loads its part; what they save becomes the folder again, and so does what they hold."""
    model = model_of(name)
    model.save_pretrained(tmp_path / "hub")
    for lines in pool.run(2, on_a_rank, name, str(tmp_path / "hub"), str(tmp_path)):
        assert not lines
    assert not differences(files_in(tmp_path / "out"), files_in(tmp_path / "hub"))
    assert not differences(files_in(tmp_path / "live"), files_in(tmp_path / "hub"))


def trained(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GPT2LMHeadModel", "Qwen2VLForConditionalGeneration"])
@pytest.mark.slow_cases("Qwen2VLForConditionalGeneration")
def test_the_optimizer_goes_along(name: str, tmp_path: Path) -> None:
    """A checkpoint in the hub's layout, with moments: training goes on from it."""
    model = model_of(name)
    optimizer, remap = trained(model), map_of(model)
    holdfast.save({"model": model, "optim": optimizer, "step": 7}, tmp_path / "live")
    holdfast.convert(tmp_path / "live", tmp_path / "hub_layout", to="holdfast", remap=remap.inverse())
    other = other_than(model)
    last = torch.optim.AdamW(other.parameters())
    state = {"model": other, "optim": last, "step": 0}
    holdfast.load(tmp_path / "hub_layout", state, remap=remap)
    assert state["step"] == 7 and not differences(other.state_dict(), model.state_dict())
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[b].items():
            assert torch.equal(last.state[a][key], value)


def test_a_checkpoint_of_another_architecture_is_refused_by_names(tmp_path: Path) -> None:
    model_of("LlamaForCausalLM").save_pretrained(tmp_path / "hub")
    mixtral = model_of("MixtralForCausalLM")
    with pytest.raises(Mismatch, match=r"model\.layers\.0\.mlp"):
        holdfast.load(tmp_path / "hub", {"model": mixtral}, remap=map_of(mixtral))
