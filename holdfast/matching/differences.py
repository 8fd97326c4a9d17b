"""What a load did, and what stands against it: the differences that one rank sees, and one error for all ranks.

`compare` finds them, and the first rank judges them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint import Checkpoint
from holdfast.commit.sections import dropped_of, left_of
from holdfast.errors import Mismatch
from holdfast.ondisk.patterns import closest, did_you_mean

UNLIKE_SHAPE = "saved with shape"
"""Part of what is said of a tensor that has another shape here."""

_BY_NUMBER = re.compile(r"(^|/)state/\d+/")
"""In names of what torch's ``optimizer.state_dict()`` returns; of a live optimizer they go by parameters."""

_SHOWN = 200


class Differences(msgspec.Struct, array_like=True):
    """How checkpoint and target differ on one rank. ``unclaimed`` has a bit for each of ``names``, the saved ones.

    A name is unclaimed if the target has no place for it, and missing if the checkpoint lacks it. ``misfits`` are
    lines about all else that does not fit. ``shapes``: of missing and, if there are any, of unclaimed tensors.
    ``castable``: whether a dtype alone does not fit.
    """

    where: str
    names: list[str]
    unclaimed: bytes
    missing: list[str]
    misfits: list[str]
    shapes: dict[str, tuple[int, ...]] = {}
    castable: bool = False


def raise_if_any(differences: Sequence[Differences], unfit: Collection[str], advice: str = "") -> None:
    """Raise Mismatch with every name of every rank, unless all fits; ``unfit``: patterns that fit nothing.

    ``advice``: a last line if the text names options that help.
    """
    first = differences[0]
    unclaimed = first.unclaimed
    for other in differences[1:]:
        # A name is left over only if no rank asked for it: a pipeline stage asks for its own layers alone.
        unclaimed = bytes(a & b for a, b in zip(unclaimed, other.unclaimed, strict=True))
    extra = [name for i, name in enumerate(first.names) if unclaimed[i // 8] >> (i % 8) & 1]
    missing = list(dict.fromkeys(name for of_rank in differences for name in of_rank.missing))
    misfits = list(dict.fromkeys(text for of_rank in differences for text in of_rank.misfits))
    if not (unfit or extra or missing or misfits):
        return
    text = [f"{first.where} does not fit what it is loaded into; nothing was changed."]
    if unfit:
        text.append("only= fits nothing in the checkpoint (holdfast show lists its names):" + listed([*unfit]))
    if misfits:
        text.append(f"{len(misfits)} differ:" + listed(misfits))
    shapes = {name: shape for of_rank in differences for name, shape in of_rank.shapes.items()}
    meant = _meant(missing, extra, shapes)
    if missing:
        text.append(
            f'{len(missing)} missing from the checkpoint (missing="keep" leaves them as they are):'
            + listed([name + did_you_mean(meant.get(name)) for name in missing])
        )
    if extra:
        asked_as = {saved: name for name, saved in meant.items()}
        text.append(
            f"{len(extra)} in the checkpoint that nothing asks for (only= leaves them out, rename= maps them):"
            + listed([name + did_you_mean(asked_as.get(name)) for name in extra])
        )
    if any(_BY_NUMBER.search(name) for name in (*missing, *extra)):
        text.append("optimizer state under numbers is of a state_dict(): give the optimizer itself in its place")
    if advice and (missing or extra or any(of_rank.castable for of_rank in differences)):
        text.append(advice)
    raise Mismatch("\n".join(text))


def _meant(missing: Sequence[str], extra: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The saved name that each missing one may stand for: of the same shape and a like last part, each once."""
    left, meant = dict.fromkeys(extra), {}
    for name in missing[:_SHOWN]:
        shape, last = shapes.get(name), _last(name)
        fitting = [saved for saved in left if shape is None or shapes.get(saved) == shape]
        same = [saved for saved in fitting if _last(saved) == last]
        # A misspelt last part is like the right one; weight and bias of one shape are not.
        found = closest(name, same) or closest(name, [saved for saved in fitting if closest(last, [_last(saved)])])
        if found is not None:
            meant[name] = found
            del left[found]
    return meant


def _last(name: str) -> str:
    return re.split(r"[/.]", name)[-1]


def listed(items: Sequence[str], shown: int = _SHOWN) -> str:
    """Items on a line each, as far as they are ``shown``."""
    lines = "".join(f"\n    {item}" for item in items[:shown])
    return lines + (f"\n    … and {len(items) - shown} more" if len(items) > shown else "")


def described(checkpoint: Checkpoint) -> str:
    """The path of a checkpoint, and what it has lost since it was saved."""
    lost = dropped_of(checkpoint.manifest)
    if not lost:
        return str(checkpoint.path)
    left = left_of(checkpoint.manifest)
    only = repr(left[0] if len(left) == 1 else left).replace("'", '"')
    return (
        f"{checkpoint.path}, of which {', '.join(lost)} was dropped by Keep(optimizer_last=…), Keep(model_every=…) or "
        f"holdfast.drop (only={only} loads what is left),"
    )


def counts_of(result: object) -> str:
    """How many names each list and dict of a result has, for its `repr`: ``", 12 restored, 3 skipped"``."""
    fields = vars(result).items()
    names = [(what.replace("_", " "), value) for what, value in fields if isinstance(value, (list, dict)) and value]
    return "".join(f", {len(value)} {what}" for what, value in names)


@dataclass(frozen=True, repr=False)
class Loaded:
    """What a load did.

    ``restored``: names of tensors and values that were loaded; ``skipped``: left out by ``only``; ``kept``: not in the
    checkpoint, kept as they were; ``cleared``: state of optimizers that went, since the checkpoint says that there was
    none; ``handed``: given to methods of a module or optimizer, and not in its state dict as saved (it may have
    converted them);
    ``cast``: name to (saved, own) dtype; ``renamed``: saved name to own name.
    Bytes are this rank's: ``bytes_needed`` by its boxes, ``bytes_read`` from storage, ``bytes_received`` from ranks
    that want the same and have read them, ``bytes_unverified`` of those needed whose blocks were read only in part, by
    any rank, and so could not be checked (``verify="blocks"`` checks all).
    """

    checkpoint: Checkpoint
    restored: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_unverified: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:  # how many names, and not all of them
        return f"Loaded({str(self.checkpoint.path)!r}{counts_of(self)})"

    @property
    def step(self) -> int | None:
        """The training step of the checkpoint."""
        return self.checkpoint.step
