"""Fine-tune a small Llama with the Hugging Face Trainer, on as many processes as you like, with DDP, or FSDP2 on GPUs.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --root runs/trainer --kill-at 7
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --root runs/trainer

The first command loses its processes in the middle of an epoch, as to a power cut; the second goes on after the last
whole checkpoint, and ends with the same bits as a run that nothing had interrupted. What holdfast adds is marked with
[1] to [3]. Needs no network: the model has random weights, and the data are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import torch
from digest import digest_of_rank  # a check for the tests; your own code does not need it
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from holdfast.trainers.huggingface import HoldfastCallback  # [1]


class Sentences(torch.utils.data.Dataset):
    """Counting, from many beginnings."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": (torch.arange(12) * (1 + index % 3) + index) % 64}


def mask_some(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws: other tokens are hidden each time."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": tokens.masked_fill(torch.rand(tokens.shape) < 0.1, 0), "labels": tokens}


class Watch(TrainerCallback):
    """Notes the losses, and dies when it is told to."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.losses = kill_at, {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder of this run")
    parser.add_argument("--every", type=int, default=2, help="save every so many steps")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--fsdp", action="store_true", help="shard the model (FSDP2); needs GPUs")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="die without a word after this step")
    args = parser.parse_args(argv)
    if args.fsdp and not torch.cuda.is_available():
        parser.error("--fsdp needs GPUs: on CPUs accelerate would take DDP in its place, without a word")

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
        )
    )
    watch = Watch(args.kill_at)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.root,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",  # [2] holdfast does
            dataloader_num_workers=args.workers,
            fsdp=args.fsdp,
            fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if args.fsdp else None,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        data_collator=mask_some,
        callbacks=[watch],
    )
    holdfast = HoldfastCallback(args.root, every=args.every).attach(trainer)  # [3]
    trainer.train()  # goes on where the last whole checkpoint is

    told = {
        "resumed": holdfast.restored.step if holdfast.restored is not None else 0,
        "losses": watch.losses,
        "digest": digest_of_rank(trainer.model, trainer.optimizer.optimizer),
    }
    if trainer.is_world_process_zero():
        print(json.dumps(told), flush=True)
    return told


if __name__ == "__main__":
    main()
