"""Checks every byte of a checkpoint, by all ranks of a group together; all get the same answer."""

from __future__ import annotations

import os
from functools import partial
from time import monotonic

import torch.distributed as dist

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.errors import Mismatch
from holdfast.ranks.ranks import DEADLINE, ranks_of
from holdfast.read.damage import Findings, Verified, verdict
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline


def verify(
    path: str | os.PathLike[str] | Place, *, deep: bool = True, raises: bool = True,
    group: dist.ProcessGroup | None = None, deadline: float = DEADLINE,
) -> Verified:  # fmt: skip
    """Check every byte of the checkpoint at ``path``, of holdfast or of another library.

    Every rank of ``group`` calls it and checks a part, and all get the same answer. Every rank must see all files.

    Args:
        path: A path, a URL, or a place in a store.
        deep: False looks at headers, sizes and attachments alone, which takes seconds for any size.
        raises: False returns damages in the place of raising them. A manifest that cannot be read is raised in any
            case.
        group: The ranks that share the work; by default the default process group, or this process alone without one.
        deadline: Seconds to wait for any one answer of a store, and for a rank once another has finished its part.

    Returns:
        What was checked, and with ``raises=False`` the ``damages``.

    Raises:
        Damaged: Bytes are not what was written; it names files, bytes and tensors.
        NotACheckpoint: There is no checkpoint.
        Unsupported: The format version is of a later holdfast.
        StorageError: Bytes cannot be read for another reason than a device that fails.
        RankLost: A rank did not come.

    Example:
        >>> holdfast.tools.verify("/ckpt/step-7").whole
        True
    """
    began, ranks = monotonic(), ranks_of(group)
    opened: list[Checkpoint] = []

    def work() -> Findings:
        opened.append(open_checkpoint(with_deadline(location(path), deadline)))
        return opened[0].reader.examine(deep=deep, share=(ranks.rank, ranks.size))

    if ranks.size == 1:
        findings = work()
    else:
        with ranks.call(f"verify {path}", deadline=deadline) as call:
            findings = call.exchange("verify", work, partial(_joined, path), Findings)
    checkpoint = opened[0]
    return verdict(checkpoint.path, checkpoint.manifest, findings, deep=deep, began=began, raises=raises)


def _joined(path: object, parts: list[Findings]) -> Findings:
    if len({part.save for part in parts}) > 1:
        raise Mismatch(
            f"the ranks found different checkpoints at {path}: it was overwritten meanwhile, or is not shared"
        )
    return Findings(
        parts[0].save,
        sum(part.nbytes for part in parts),
        sum(part.read for part in parts),
        sum(part.unverified for part in parts),
        sorted({fault for part in parts for fault in part.faults}),
        [damage for part in parts for damage in part.others],
    )
