"""Train a LoRA adapter on a frozen mixture-of-experts model, and hand the adapter on as a folder of its own.

    torchrun --standalone --nproc-per-node 2 examples/lora.py --root runs/lora --steps 6
    torchrun --standalone --nproc-per-node 1 examples/lora.py --root runs/lora --steps 9   # goes on, on one process

With ``incremental=True`` the frozen weights are written once, by the first checkpoint; each later one writes the
adapter and its optimizer, and cites the rest. Each is a whole checkpoint all the same. Needs no network: the weights
are random.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM

import holdfast
from holdfast.trainers.peft import export_adapter


def base_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def adapted() -> PeftModel:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    return get_peft_model(base_model(), lora)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder of this run")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args(argv)
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("gloo")

    model = adapted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    state = {"model": model, "optimizer": optimizer, "step": 0}
    manager = holdfast.CheckpointManager(args.root, every=3, incremental=True)
    loaded = manager.restore(state)
    losses = {}
    for step in range(state["step"] + 1, args.steps + 1):
        tokens = (torch.arange(12) * step).view(1, 12) % 64  # the same on every rank, so any number of ranks will do
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"], losses[step] = step, loss.item()
        manager.step(step, state)
    manager.close()

    newest, folder = manager.latest(), Path(args.root) / "adapter"
    if dist.get_rank() == 0:
        with torch.device("meta"):
            shape = adapted()  # only to say what an adapter is: it takes no memory
        export_adapter(newest, folder, shape)
        plain = PeftModel.from_pretrained(base_model(), folder)  # on any machine, without holdfast
        print(f"{sum('lora' in name for name in plain.state_dict())} tensors of the adapter in {folder}")
    result = {"resumed": loaded.step if loaded is not None else 0, "losses": losses}
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    if owns_group:
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
