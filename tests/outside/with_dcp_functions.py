"""Functions of `torch.distributed.checkpoint` replaced by those of `holdfast.dcp`: a pytest plugin.

A call of a deprecated function, which holdfast.dcp leaves out, becomes what torch's warning says: `save` or `load`.
holdfast itself goes on with torch's own functions where it uses torch's engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import on_cpu  # noqa: F401 - the tests run on the CPU
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import format_utils, optimizer, state_dict_loader, state_dict_saver

import holdfast.dcp.loading
import holdfast.dcp.saving
from holdfast import dcp
from holdfast.dcp.arguments import stores_itself

THEIRS = SimpleNamespace(**vars(state_dict_saver) | vars(state_dict_loader))


def save_state_dict(state_dict: Any, storage_writer: Any, *args: Any, **options: Any) -> Any:
    if stores_itself(storage_writer):  # holdfast hands it to torch's engine in any case
        return THEIRS.save_state_dict(state_dict, storage_writer, *args, **options)
    return dcp.save(state_dict, *args, storage_writer=storage_writer, **options)


def load_state_dict(state_dict: Any, storage_reader: Any, *args: Any, **options: Any) -> None:
    if stores_itself(storage_reader):
        THEIRS.load_state_dict(state_dict, storage_reader, *args, **options)
    else:
        dcp.load(state_dict, *args, storage_reader=storage_reader, **options)


vars(holdfast.dcp.saving).update(state_dict_saver=THEIRS)
vars(holdfast.dcp.loading).update(state_dict_loader=THEIRS)
vars(state_dict_saver).update(save=dcp.save, async_save=dcp.async_save, save_state_dict=save_state_dict)
vars(state_dict_loader).update(load=dcp.load, load_state_dict=load_state_dict)
vars(torch_dcp).update(
    save=dcp.save, async_save=dcp.async_save, save_state_dict=save_state_dict, load=dcp.load,
    load_state_dict=load_state_dict, load_sharded_optimizer_state_dict=dcp.load_sharded_optimizer_state_dict,
)  # fmt: skip
vars(optimizer).update(load_sharded_optimizer_state_dict=dcp.load_sharded_optimizer_state_dict)
vars(format_utils).update(dcp_to_torch_save=dcp.format_utils.dcp_to_torch_save)
