"""Converts a checkpoint, or a state in memory, to another format. Users call `convert`.

Never holds more than a few windows of the state, and never shows a target that is not whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.export.conversion import run
from holdfast.export.huggingface import Extras
from holdfast.export.live import LiveWork, check_live
from holdfast.export.live_reader import gather_live
from holdfast.export.work import MAX_SHARD_BYTES, Converted, ConvertWork, Options, To, floating, format_named
from holdfast.ondisk.patterns import Patterns, Rename
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.ranges import Verify
from holdfast.remap.remap import Remap
from holdfast.saving import Saving
from holdfast.storage.place import Place
from holdfast.storage.urls import location


def convert(
    source: str | os.PathLike[str] | Place | Checkpoint | Saving | Mapping[str, Any],
    target: str | os.PathLike[str] | Place, *, to: To = "holdfast",
    only: Patterns = "*", rename: Rename | None = None, dtype: torch.dtype | str | None = None, step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES, extras: Extras | None = None, overwrite: bool = False,
    verify: Verify = True, group: torch.distributed.ProcessGroup | None = None, deadline: float = DEADLINE,
    remap: Remap | None = None,
) -> Converted:  # fmt: skip
    """Write a checkpoint, or the state of a training run, to ``target`` in another format, tensor by tensor.

    Every rank of ``group`` calls it with the same arguments and copies its share; the result does not depend on how
    many there are. Host memory stays below 512 MiB a rank. If it is killed or fails, nothing lies under the target's
    name, and the same call goes on from ``<target>.partial``. A ``target`` in a store is first written to the temporary
    folder of the machine (``TMPDIR``), which needs room for all of it.

    A state is written from memory, with no checkpoint in between and nothing gathered: each rank writes what it has
    into the files of the target. It must not change meanwhile, and a call that fails begins from the start.

    Args:
        source: A checkpoint of any format that holdfast reads: a path, a URL, or an opened one. Or a state as for
            `save`, such as ``{"model": model}``, which all ranks give, for Hugging Face. Or a save under way: then the
            call waits until it is committed, and converts its checkpoint.
        target: A folder, a file or a URL.
        to: ``"holdfast"`` (a folder), ``"huggingface"`` or ``"hf"`` (a folder with the model's tensors), ``"torch"`` (a
            file for `torch.load`) or ``"dcp"`` (a folder for `torch.distributed.checkpoint`).
        only: What to take, by the source's names: a name, a path above names, a pattern, or several.
        rename: The source's names to others: a dict of names or leading paths, or a function. An empty new path drops
            the leading one. For Hugging Face, the source's names have no ``model/`` and have points.
        dtype: What floating-point tensors become: a dtype of torch, or its name.
        step: The step to note in the place of the source's, in our own format.
        max_shard_bytes: Bytes of tensors in one file at most. A target other than ``"torch"`` has as many files as
            needed.
        extras: Files to put beside a Hugging Face model, such as config.json and the tokenizer: paths, a folder, or a
            dict of names to paths or bytes.
        overwrite: Replace a target that exists, once the new one is whole.
        verify: As in `load`.
        group: The ranks that convert; by default the default process group, or this process alone without one.
        deadline: Seconds to wait for a rank or a store that makes no progress.
        remap: A map from the source's layout to the target's (`holdfast.remap`). ``only`` and ``rename`` go by the
            names that it makes.

    Returns:
        What was written, and what was left out and why.

    Raises:
        NotACheckpoint: There is no checkpoint at ``source``.
        Mismatch: ``only`` or ``rename`` fits nothing, or makes two tensors one.
        Unsupported: The target's format cannot hold something; it names what.
        Damaged: Bytes of the source are not what was written.
        SaveFailed: ``source`` is a save under way, which failed.
        StorageError: ``target`` exists, or the disk or store refused.
        RankLost: A rank did not come.

    Example:
        >>> holdfast.convert("/ckpt/step-7", "/models/weights.pt", to="torch", only="model").nbytes > 0
        True
    """
    options = Options(
        format_named(to), only, rename, floating(dtype), step, max_shard_bytes, extras, overwrite, verify, remap
    )
    options.check(target)
    if isinstance(source, Mapping):
        state = source
        check_live(options)
        return run(
            lambda call, *where: LiveWork(gather_live(call, state), *where), location(target), options, group=group,
            deadline=deadline,
        )  # fmt: skip
    opened = source.wait() if isinstance(source, Saving) else source
    return run(
        lambda call, *where: ConvertWork(opened, *where), location(target), options, group=group, deadline=deadline
    )
