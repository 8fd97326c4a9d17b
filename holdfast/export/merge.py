"""Merges checkpoints: weighted sums of their tensors, as a conversion with several sources. Users call `merge`.

Never holds more than a few windows of the states, and never shows a target that is not whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import fsum, isfinite
from typing import Literal, get_args

import torch

from holdfast.export.conversion import run
from holdfast.export.huggingface import Extras
from holdfast.export.merging import MergeWork, Recipe
from holdfast.export.partial import Partial
from holdfast.export.work import MAX_SHARD_BYTES, Converted, Options, Source, To, floating, format_named
from holdfast.ondisk import dtypes
from holdfast.ondisk.patterns import Patterns, Rename
from holdfast.ranks.ranks import DEADLINE, Call, Ranks
from holdfast.read.ranges import Verify
from holdfast.storage.place import Place
from holdfast.storage.urls import location

Method = Literal["sum", "slerp"]


def merge(
    sources: Sequence[Source], target: str | os.PathLike[str] | Place, *,
    weights: Sequence[float] | None = None, decay: float | None = None, base: Source | None = None,
    method: Method = "sum", t: float | None = None, accumulate: torch.dtype = torch.float64, to: To = "holdfast",
    only: Patterns | None = None, rename: Rename | None = None, dtype: torch.dtype | str | None = None,
    step: int | None = None, max_shard_bytes: int = MAX_SHARD_BYTES, extras: Extras | None = None,
    overwrite: bool = False, verify: Verify = True, group: torch.distributed.ProcessGroup | None = None,
    deadline: float = DEADLINE,
) -> Converted:  # fmt: skip
    """Write weighted sums of the tensors of checkpoints to ``target``. Formats and layouts may differ.

    Floating-point and complex tensors are summed. Other tensors must be equal in all sources; those with one element,
    such as counters, come from the last source. So do dtypes, values and attached files. The sources must have the same
    names and shapes; open one with ``remap=`` if its names differ.

    Each source is read once, with SLERP twice. Host memory stays below 256 MiB a rank. Ranks, stores and interruptions
    are as in `convert`.

    Args:
        sources: Checkpoints of any format: paths, URLs, or opened ones.
        target: A folder, a file or a URL.
        weights: One for each source, by default 1 / n. They are not divided by their sum. A source of weight 0 is not
            read.
        decay: In the place of ``weights``: an exponential moving average over the sources, the oldest first.
        base: Task arithmetic: the result is ``base`` plus the weighted differences of the sources from it.
        method: ``"sum"``, or ``"slerp"`` for spherical interpolation between two sources, tensor by tensor. It is
            linear where the cosine between two tensors is above 0.9995 or below -0.9995.
        t: For SLERP: 0 is the first source, 1 the second.
        accumulate: The dtype in which sums are made: float64, or float32, which takes less time.
        to: As in `convert`, as are all arguments that follow.
        only: What to take. By default the section ``model`` if the last source has one, so no optimizer.
        rename: Names to others.
        dtype: What floating-point tensors become: a dtype of torch, or its name.
        step: The step to note.
        max_shard_bytes: Bytes of tensors in one file at most.
        extras: Files to put beside a Hugging Face model.
        overwrite: Replace a target that exists, once the new one is whole.
        verify: As in `load`: a block of which two windows have parts is checked with ``"blocks"`` alone.
        group: The ranks that merge.
        deadline: Seconds to wait for a rank or a store that makes no progress.

    Returns:
        What was written. ``not_summed`` lists the tensors that are no sums.

    Raises:
        Mismatch: The sources have other names, shapes or kinds of dtypes; it lists them.
        ValueError: There is no source, or weights do not fit.

    Example:
        >>> merged = holdfast.tools.merge(["/ckpt/step-7", "/ckpt/step-8"], "/models/soup.pt", to="torch")
        >>> merged.nbytes > 0
        True
    """
    if isinstance(sources, (str, bytes, os.PathLike)) or not len(sources):
        raise ValueError(f"sources is a list of at least one checkpoint, not {sources!r}")
    if accumulate not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate is torch.float32 or torch.float64, not {accumulate}")
    options = Options(
        format_named(to), "*" if only is None else only, rename, floating(dtype), step, max_shard_bytes, extras,
        overwrite, verify,
    )  # fmt: skip
    options.check(target)
    factors = _weights(len(sources), weights, decay, method, t, has_base=base is not None)
    terms = [*([] if base is None else [base]), *sources]
    recipe = Recipe(factors, t, dtypes.name_of(accumulate), model_only=only is None)

    def begin(call: Call, place: Place, options: Options, ranks: Ranks, partial: Partial) -> MergeWork:
        work = MergeWork(terms, recipe, place, options, ranks, partial)
        work.measure(call)
        return work

    return run(begin, location(target), options, group=group, deadline=deadline)


def _weights(
    count: int, weights: Sequence[float] | None, decay: float | None, method: str, t: float | None, *, has_base: bool
) -> tuple[float, ...]:
    """The weight of each source, that of a base first. Raises ValueError for arguments that do not go together."""
    if method not in get_args(Method):
        raise ValueError(f"method is one of {', '.join(map(repr, get_args(Method)))}, not {method!r}")
    if method == "slerp":
        if count != 2 or weights is not None or decay is not None or has_base:
            raise ValueError('method="slerp" takes two sources and t=, and neither weights= nor decay= nor base=')
        if t is None or not 0 <= t <= 1:
            raise ValueError(f"t is between 0 and 1, not {t}")
        return (1.0, 1.0)
    if t is not None:
        raise ValueError('t goes with method="slerp"')
    if decay is not None:
        if weights is not None or has_base:
            raise ValueError("decay= gives the weights: it goes with neither weights= nor base=")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is between 0 and 1, not {decay}")
        return ema_weights(count, decay)
    if weights is None:
        if has_base:
            raise ValueError("base= needs weights=: how much of each source's difference to add")
        return (1 / count,) * count
    factors = tuple(map(float, weights))
    if len(factors) != count or not all(map(isfinite, factors)):
        raise ValueError(f"weights are {count} finite numbers, one for each source, not {list(weights)}")
    return (fsum([1.0, *(-factor for factor in factors)]), *factors) if has_base else factors


def ema_weights(count: int, decay: float) -> tuple[float, ...]:
    """What each of the sources, the oldest first, counts in their exponential moving average."""
    return tuple((1 - decay if k else 1.0) * decay ** (count - 1 - k) for k in range(count))
