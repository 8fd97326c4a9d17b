"""The adapter of a peft model out of a checkpoint, as the folder that `PeftModel.from_pretrained` reads."""

from __future__ import annotations

import os
from typing import Any

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.errors import Mismatch
from holdfast.ondisk import names
from holdfast.storage.place import Place

try:
    from peft import PeftModel
except ImportError as error:
    raise ImportError("holdfast.trainers.peft needs peft: pip install peft") from error


def export_adapter(
    source: str | os.PathLike[str] | Place | Checkpoint, folder: str | os.PathLike[str], model: PeftModel, *,
    adapter: str = "default", section: str = "model",
) -> list[str]:  # fmt: skip
    """Write one adapter of the peft model saved in ``source`` to ``folder``; returns the names that were read.

    Called on one rank. ``model`` says what the adapter is: any model with the same base and `PeftConfig`, on the meta
    device if you like; its own tensors are not read. ``section`` is the name of the model in the saved state. Of the
    checkpoint only the adapter is read, and with it what else is trained (``modules_to_save``, say), on the CPU.

    Raises NotACheckpoint or Damaged for the source, Mismatch if it holds no such adapter.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if adapter not in model.peft_config:
        raise Mismatch(f"the model has no adapter {adapter!r}, but {', '.join(map(repr, model.peft_config))}")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = {
        path: fqn
        for path in checkpoint.tensors
        for head, fqn in [(path.partition("/")[0], names.unescape(path.partition("/")[2]))]
        if head == section and (adapter in fqn.split(".") or fqn in trained)
    }
    if not any(adapter in fqn.split(".") for fqn in wanted.values()):
        raise Mismatch(f"{checkpoint.path} holds no tensors of an adapter {adapter!r} in its section {section!r}")
    tensors: dict[str, Any] = {fqn: checkpoint.read(path) for path, fqn in wanted.items()}
    model.save_pretrained(os.fspath(folder), state_dict=tensors, selected_adapters=[adapter])
    return list(wanted)
