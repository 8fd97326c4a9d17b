"""The proof of a map: which elements of the source become which of the target, without reading one.

`Remap.check` calls it. It counts every element, by boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.errors import Mismatch
from holdfast.ondisk.box import Box, intersect, tiling_fault, whole
from holdfast.remap.boxes import Part, merged_boxes, parts_of
from holdfast.remap.nodes import Node, Saved, described, walk

_SHOWN = 20


@dataclass(frozen=True)
class Proof:
    """What a map does beside moving each element to one place.

    Attributes:
        left_over: The tensors of the source, or boxes of them, that go nowhere.
        repeated: Those that go to several places: tied tensors, layers taken twice.
        made_up: Tensors of the target with elements that are not from the source.
        cast: Tensors of the target with another dtype than their source, which may round.
    """

    left_over: tuple[str, ...]
    repeated: tuple[str, ...]
    made_up: tuple[str, ...]
    cast: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the map can be undone without a loss."""
        return not (self.left_over or self.repeated or self.made_up or self.cast)


def compared(made: Mapping[str, Node], source: Mapping[str, object], target: Mapping[str, Saved]) -> Proof:
    """What a map makes, compared with the target that is wanted. Raises Mismatch with all that is not alike."""
    faults = [f"{name} is not made" for name in target if name not in made]
    faults += [
        f"{name} is made, but not wanted: {described(node)}" for name, node in made.items() if name not in target
    ]
    for name, node in made.items():
        wanted = target.get(name)
        if wanted is not None and (wanted.shape, wanted.dtype) != (node.shape, node.dtype):
            faults.append(
                f"{name} is made as {node.dtype} {list(node.shape)}, but {wanted.dtype} {list(wanted.shape)} is wanted"
            )
    if faults:
        more = [f"… and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise Mismatch("the map does not fit:" + "".join(f"\n    {fault}" for fault in [*faults[:_SHOWN], *more]))
    return proof_of(made, source)


def proof_of(made: Mapping[str, Node], source: Iterable[str]) -> Proof:
    """What becomes of every element of the source."""
    boxes: dict[Saved, list[Box]] = {}
    made_up: dict[str, None] = {}
    cast = []
    for name, node in made.items():
        for part in parts_of(node, whole(node.shape), torch.empty(node.shape, dtype=torch.uint8, device="meta")):
            if isinstance(part, Part):
                plain = part._replace(view=torch.empty(part.box.lengths, device="meta"))
                boxes.setdefault(part.saved, []).extend(box for box, _ in merged_boxes(plain))
            else:
                made_up[name] = None
        if any(isinstance(inner, Saved) and inner.dtype != node.dtype for inner in walk(node)):
            cast.append(name)
    used = {saved.name for saved in boxes}
    left_over = [name for name in source if name not in used and not _is_empty(source, name)]
    repeated = []
    for saved, those in boxes.items():
        if those == [whole(saved.shape)]:
            continue
        if _overlap(saved, those):
            repeated.append(saved.name)
        left_over += [f"{saved.name}{box}" for box in _missing(saved.shape, those)]
    return Proof(tuple(left_over), tuple(repeated), tuple(made_up), tuple(cast))


def _is_empty(source: Iterable[str], name: str) -> bool:
    shape = getattr(source[name], "shape", (1,)) if isinstance(source, Mapping) else (1,)
    return 0 in tuple(shape)


def _overlap(saved: Saved, boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element."""
    if len(boxes) == 1 or sum(box.size for box in boxes) > whole(saved.shape).size:
        return len(boxes) > 1
    return tiling_fault(saved.shape, [*boxes, *_missing(saved.shape, boxes)]) is not None


def _missing(shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """What of a tensor no box covers, as boxes."""
    rest = [whole(shape)]
    for box in boxes:
        rest = [part for one in rest for part in _without(one, box)]
    return rest


def _without(box: Box, other: Box) -> list[Box]:
    """A box without what it shares with another one."""
    shared = intersect(box, other) if box.lengths else (box if other.size else None)
    if shared is None:
        return [box]
    parts: list[Box] = []
    for dim in range(len(box.offsets)):
        before = (shared.offsets[:dim], shared.lengths[:dim])
        low, high = shared.offsets[dim], shared.offsets[dim] + shared.lengths[dim]
        for start, stop in ((box.offsets[dim], low), (high, box.offsets[dim] + box.lengths[dim])):
            if start < stop:
                offsets = (*before[0], start, *box.offsets[dim + 1 :])
                parts.append(Box(offsets, (*before[1], stop - start, *box.lengths[dim + 1 :])))
    return parts
