"""Folds an adapter of low rank (LoRA, as peft keeps it) into the weights that it belongs to, or takes it out again.

Users call `fold_lora`. It is a conversion in which some tensors are sums; the products are computed a window at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch, NotACheckpoint, Unsupported
from holdfast.export import huggingface
from holdfast.export.conversion import run
from holdfast.export.huggingface import Extras
from holdfast.export.partial import Partial
from holdfast.export.selection import Leaf, Selection, Term, Update, can_cast
from holdfast.export.work import MAX_SHARD_BYTES, Converted, ConvertWork, Options, Source, To, floating, format_named
from holdfast.matching.differences import listed
from holdfast.ondisk import names
from holdfast.ondisk.patterns import Patterns
from holdfast.ranks.ranks import DEADLINE, Call, Ranks
from holdfast.read.ranges import Verify
from holdfast.storage.place import Place
from holdfast.storage.urls import location

CONFIG = "adapter_config.json"
_HEAD = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.*)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?:\.weight)?")
_MORE = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters",
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
"""Settings of peft with which the change of a weight is more than a product of two matrices."""

TOTAL = "float64"
"""What products and sums are computed in."""


def fold_lora(
    base: Source, adapter: Source, target: str | os.PathLike[str] | Place, *, scale: float = 1.0, to: To = "holdfast",
    only: Patterns | None = None, dtype: torch.dtype | str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
    extras: Extras | None = None, overwrite: bool = False, verify: Verify = True,
    group: torch.distributed.ProcessGroup | None = None, deadline: float = DEADLINE,
) -> Converted:  # fmt: skip
    """Write ``base`` with a LoRA adapter added to its weights, as peft's ``merge_and_unload`` does.

    Sums are made in float64 and rounded once. Ranks, stores and interruptions are as in `convert`, and so are the
    arguments that are not listed.

    Args:
        base: A checkpoint of the base model, of any format. Open it with ``remap=`` if its names differ.
        adapter: The folder that ``PeftModel.save_pretrained`` wrote, on disk or in a store.
        target: A folder, a file or a URL.
        scale: How much of the adapter to add. -1 takes it out of weights that have it; they come back but for rounding.
        only: What to take. By default the section ``model`` if there is one: an optimizer's state does not follow.

    Returns:
        What was written.

    Raises:
        Mismatch: ``base`` lacks a weight of the adapter, or has it in another shape; it lists all of them.
        Unsupported: The adapter is of another kind than LoRA, or uses DoRA or other settings that change more.
        NotACheckpoint: There is no adapter at ``adapter``.
    """
    if not isfinite(scale):
        raise ValueError(f"scale is a finite number, not {scale}")
    options = Options(
        format_named(to), "*" if only is None else only, None, floating(dtype), None, max_shard_bytes, extras,
        overwrite, verify,
    )  # fmt: skip
    options.check(target)

    def begin(call: Call, place: Place, options: Options, ranks: Ranks, partial: Partial) -> _FoldWork:
        recipe = _Recipe(adapter, scale, model_only=only is None)
        return _FoldWork(base, recipe, place, options, ranks, partial)

    return run(begin, location(target), options, group=group, deadline=deadline)


@dataclass(frozen=True)
class _Recipe:
    adapter: Source
    scale: float
    model_only: bool


class _FoldWork(ConvertWork):
    """A `ConvertWork` in which the weights that an adapter changes are sums of two terms."""

    def __init__(
        self, base: Source, recipe: _Recipe, target: Place, options: Options, ranks: Ranks, partial: Partial
    ) -> None:
        super().__init__(base, target, options, ranks, partial)
        self._recipe = recipe
        self._adapter: Checkpoint | None = None

    def _opened(self) -> Checkpoint:
        checkpoint = super()._opened()
        if self._recipe.model_only:
            self.options = replace(self.options, only=huggingface.section_of(checkpoint, "*") or "*")
        self._adapter = self._open(self._recipe.adapter)
        return checkpoint

    def _select(self) -> Selection:
        selection, adapter = super()._select(), self._adapter
        if adapter is None:
            raise AssertionError("the adapter is opened with the base")
        updates = updates_of(adapter)
        tensors, faults = dict(selection.tensors), []
        by_fqn = {selection.origin[name].rpartition("/")[2]: name for name in selection.origin}
        for fqn, update in updates.items():
            name = by_fqn.get(fqn)
            name = selection.aliases.get(name, name) if name is not None else None
            if name is None:
                faults.append(f"there is no {fqn}")
                continue
            leaf = tensors[name]
            folded = _folded(self.checkpoint, leaf, update, self._recipe.scale)
            if isinstance(folded, str):
                faults.append(f"{fqn} {folded}")
            elif leaf.terms:
                faults.append(f"{fqn} is tied to another weight of the adapter")
            else:
                tensors[name] = folded
        if faults:
            raise Mismatch(f"{self.checkpoint.path} is not the base of the adapter {adapter.path}:{listed(faults)}")
        return replace(selection, tensors=tensors)

    def _stamps(self) -> list[tuple[str, int, str | int]]:
        return [*super()._stamps(), *(self._stamps_of(self._adapter) if self._adapter is not None else [])]


def _folded(base: Checkpoint, leaf: Leaf, update: Update, scale: float) -> Leaf | str:
    """The weight as a sum; or why it is none."""
    shape = (update.left.shape[0], update.right.shape[1])
    if leaf.shape != shape:
        return f"has shape {list(leaf.shape)}, the adapter's {list(shape)}"
    if not can_cast(leaf.record.dtype):
        return f"is {leaf.record.dtype}, to which nothing can be added"
    product = replace(leaf, record=msgspec.structs.replace(leaf.record, dtype=TOTAL), sealed=False, made=True)
    return replace(leaf, terms=(Term(base, leaf, 1.0), Term(base, product, scale, update)), total=TOTAL)


def updates_of(adapter: Checkpoint) -> dict[str, Update]:
    """What an adapter adds to each weight, by the weight's name in the base model. Raises Unsupported, Mismatch."""
    if CONFIG not in adapter.attachments:
        raise NotACheckpoint(f"{adapter.path} has no {CONFIG}: give the folder that PeftModel.save_pretrained wrote")
    try:
        config: dict[str, Any] = msgspec.json.decode(adapter.attachment(CONFIG), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Mismatch(f"{adapter.path / CONFIG} cannot be read: {error}") from None
    more = [name for name in _MORE if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or more:
        what = ", ".join(more) or (f"bias={config['bias']!r}" if config.get("bias", "none") != "none" else "")
        kind = config.get("peft_type")
        raise Unsupported(
            f"{adapter.path} is an adapter of the kind {kind}{f' with {what}' if what else ''}: only plain LoRA is a "
            "sum of matrices. Merge it with peft (merge_and_unload) and save the result"
        )
    sides: dict[tuple[str, bool], dict[str, torch.Tensor]] = {}
    for path in adapter.tensors:
        name = names.unescape(path.rpartition("/")[2])
        match = _TENSOR.fullmatch(name.removeprefix(_HEAD))
        if match is None:
            raise Unsupported(f"{adapter.path}: {name} is no matrix of LoRA; merge it with peft (merge_and_unload)")
        sides.setdefault((match["module"], bool(match["table"])), {})[match["side"]] = adapter.read(path)
    updates = {}
    for (module, is_table), pair in sides.items():
        if pair.keys() != {"A", "B"} or any(side.ndim != 2 for side in pair.values()):
            raise Unsupported(f"{adapter.path}: {module} has no two matrices; merge it with peft (merge_and_unload)")
        a, b = pair["A"], pair["B"]
        left, right = (a.T, b.T) if is_table or config.get("fan_in_fan_out") else (b, a)
        updates[f"{module}.weight"] = Update(left.double() * _scaling(config, module, a.shape[0]), right.double())
    if not updates:
        raise Mismatch(f"{adapter.path} has no tensors of an adapter")
    return updates


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """peft's factor of an adapter: alpha / rank, of a module that has its own alpha too (``get_pattern_key``)."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = next((alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(config["lora_alpha"] if own is None else own)
    return alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank
