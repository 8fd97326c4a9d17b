"""From a plan to this rank's images: which pieces it writes, under which keys, from which memory.

`save` calls `images_of` before it writes. Moves no byte and opens no file.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from holdfast.errors import HoldfastError, Unsupported
from holdfast.ondisk import datafile, dtypes, names
from holdfast.ondisk.box import Box, relative
from holdfast.ondisk.datafile import Piece
from holdfast.plan.plan import Plan
from holdfast.plan.volumes import file_of
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected
from holdfast.write.image import Image

Lengths = tuple[int, ...]

Source = Callable[[Collected, str, Box], torch.Tensor]
"""Where a piece lies in the memory of this rank."""


def images_of(
    state: Collected, plan: Plan, ranks: Ranks, save: str, *, writer: int | None = None, source: Source | None = None
) -> list[Image]:
    """This rank's data files: the pieces it owns and its own PerRank values, by section and volume.

    As another ``writer`` than its own (`degraded.writer_of`) a rank has pieces alone. ``source`` tells where they lie,
    if not in the state.
    """
    number, find = ranks.rank if writer is None else writer, source or memory_of
    parts: dict[tuple[str, int], list[tuple[Piece, torch.Tensor, tuple[int, ...]]]] = {}

    def add(name: str, key: str, dtype: str, tensor: torch.Tensor, shape: tuple[int, ...], lengths: Lengths) -> None:
        part = (names.section_of(name), plan.volumes.get(name, 0))
        found = parts.get(part)
        if found is None:
            found = parts[part] = []
        found.append((Piece(key, dtype, lengths, tensor.nbytes), tensor, shape))

    for name, tensor, box in plan.written_by(number):
        key = datafile.key_of(names.in_section(name), box, tensor.shape)
        if box.size:
            found_at = find(state, name, box)
        else:  # an empty tensor, of which a sharded one has no view
            found_at = torch.empty(box.lengths, dtype=dtypes.torch_dtype(tensor.dtype), device="cpu")
        add(name, key, tensor.dtype, found_at, tensor.shape, box.lengths)
    for path, leaf in state.per_rank.items() if writer is None else ():
        own = f"{names.in_section(path)}@{ranks.rank}"
        text = bytearray(msgspec.json.encode(leaf.encoded))
        add(path, own, "uint8", torch.frombuffer(text, dtype=torch.uint8), (len(text),), (len(text),))
        for reference, inner in leaf.tensors.items():
            add(path, f"{own}/{reference}", dtypes.name_of(inner.dtype), inner, tuple(inner.shape), tuple(inner.shape))
    images = []
    for (section, volume), found in parts.items():
        by_key = {piece.key: (source, shape) for piece, source, shape in found}
        if len(by_key) < len(found):
            raise Unsupported(f"two tensors of section {section!r} have the same key: rename the one at the top")
        pieces = datafile.arrange(piece for piece, _, _ in found)
        shapes = {datafile.base_of(p.key): by_key[p.key][1] for p in pieces if "[" in p.key or _shape_is_lost(p)}
        path = file_of(section, number, ranks.size, save, volume, plan.volumes)
        images.append(Image(path, section, pieces, [by_key[p.key][0] for p in pieces], shapes, volume))
    return images


def _shape_is_lost(piece: Piece) -> bool:
    # A single number of a type kept as bytes is stored as one row of bytes, as a vector of one would be.
    return not piece.lengths and datafile.stored_as_bytes(piece.dtype)


def memory_of(state: Collected, name: str, box: Box) -> torch.Tensor:
    """This rank's memory of one planned piece: a view, or a part of one."""
    for view in state.entries[name].views:
        if view.box is box or view.box == box:
            return view.tensor
        if all(a >= b for a, b in zip(box.offsets, view.box.offsets, strict=True)) and all(
            a <= b for a, b in zip(box.ends, view.box.ends, strict=True)
        ):
            part = view.tensor
            for dim, (start, length) in enumerate(zip(*relative(box, view.box), strict=True)):
                part = part.narrow(dim, start, length)
            return part
    raise HoldfastError(f"this rank was to write {name}{box} and does not hold it; this is a fault of holdfast")
