"""verl's FSDP workers save to holdfast: one checkpoint that any number of ranks can load.

Copy this file to where Python finds it, and name it on all nodes:

    export VERL_USE_EXTERNAL_MODULES=holdfast_in_verl
"""

from pathlib import Path
from typing import Any

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.engine.fsdp import transformer_impl

import holdfast


class HoldfastCheckpointManager(FSDPCheckpointManager):
    """verl's checkpoint manager, with one checkpoint in the place of a file for each rank."""

    def state(self, contents: list[str]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if "model" in contents:
            parts["model"] = self.model
        if "optimizer" in contents and self.optimizer is not None:
            parts["optimizer"] = self.optimizer
        if "extra" in contents:
            parts["rng"] = holdfast.RNG()
            if self.lr_scheduler is not None:
                parts["scheduler"] = self.lr_scheduler
        return parts

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        if local_path is None:
            return
        contents = self.checkpoint_save_contents
        holdfast.save(self.state(contents), Path(local_path) / "holdfast", step=global_step, overwrite=True)
        # Only now may verl delete older ones. It writes the tokenizer and the configuration, too.
        self.checkpoint_save_contents = [part for part in contents if part == "hf_model"]
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self.checkpoint_save_contents = contents

    def load_checkpoint(self, local_path: str, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        if local_path is None:
            return
        saved = Path(local_path) / "holdfast"
        if not (saved / "manifest.json").is_file():  # one of verl's own
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        parts = self.state(self.checkpoint_load_contents)
        holdfast.load(saved, parts, only=list(parts))


transformer_impl.FSDPCheckpointManager = HoldfastCheckpointManager
