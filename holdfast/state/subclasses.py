"""Tensors that are more than their bytes: subclasses of parts, and DTensors that are laid out unlike their parameter.

What such a tensor is stands as a note beside its parts (`note_of`), so that one can be made where no live tensor is
(`made_of`). Never imports a class: only one that the program has loaded itself is made.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import containers, dtypes, values
from holdfast.ondisk.containers import Container
from holdfast.state.kinds import is_dtensor
from holdfast.state.tensors import PLAIN

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class TensorNote(msgspec.Struct, omit_defaults=True):
    """``kind``: module and name of the subclass, empty for none; ``context``: what it gives beside its parts;
    ``outer``: its size and strides.

    ``strides``: of a plain tensor whose elements lie in another order than those of a new one, because sums over them
    would come out differently. ``placements``: of a DTensor, by mesh axis the tensor axis that it cuts, null if it
    replicates.
    """

    kind: str = ""
    context: Any = None
    outer: tuple[list[int], list[int]] | None = None
    placements: list[int | None] | None = None
    strides: list[int] | None = None
    shape: list[int] | None = None


def is_flattening(tensor: object) -> bool:
    """Whether ``tensor`` is of a subclass that can be flattened into its parts, and no DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor)


def note_of(name: str, tensor: torch.Tensor, parameter: torch.Tensor | None) -> Container | None:
    """What a load has to know to make a tensor of an optimizer's or object's state; None if nothing.

    Raises Unsupported if the subclass gives a context that no checkpoint keeps.
    """
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
    placements = None
    if is_dtensor(tensor):
        if not is_flattening(local) and parameter is not None and tensor.shape == parameter.shape:
            return None
        placements = [int(p.dim) if hasattr(p, "dim") else None for p in tensor.placements]
    if not is_flattening(local):
        strides = None if placements is not None else _strange_strides(tensor, parameter)
        note = TensorNote(placements=placements, strides=strides)
        return None if note == TensorNote() else _noted(note)
    _, context = local.__tensor_flatten__()
    try:
        encoded = values.encode_tree(context, _no_tensor)
    except values.Refused as error:
        raise Unsupported(
            f"{name} is a {type(local).__qualname__} whose context cannot be kept: {error.reason}"
        ) from None
    kind = f"{type(local).__module__}:{type(local).__qualname__}"
    outer = list(local.shape), list(local.stride())
    shape = list(tensor.shape) if placements is not None else None
    return _noted(TensorNote(kind, encoded, outer, placements=placements, shape=shape))


def _strange_strides(tensor: torch.Tensor, parameter: torch.Tensor | None) -> list[int] | None:
    """The strides of a dense tensor, unless one that is made like its parameter has the same."""
    if tensor.layout is not torch.strided or tensor.numel() < 2:
        return None
    alike = parameter is not None and type(parameter) in PLAIN and parameter.shape == tensor.shape
    usual = parameter.stride() if alike and parameter is not None else _strides(tensor.shape)
    if tensor.stride() == usual or (tensor.is_contiguous() and not alike):
        return None
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in by_stride:
        if size > 1 and stride != expected:
            return None  # it has gaps, or shares elements: no order of a tensor of its own
        expected *= size
    return list(tensor.stride())


def read_note(noted: containers.Note | None) -> TensorNote | None:
    """The note that stands in the place of a container's, if it is one. Raises Unsupported if it cannot be read."""
    if not isinstance(noted, Container) or noted.tensor is None:
        return None
    try:
        return msgspec.json.decode(noted.tensor, type=TensorNote)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unsupported(f"a tensor is noted as {noted.tensor[:200]!r}, which cannot be read ({error})") from None


def made_of(
    name: str, note: TensorNote, parts: Mapping[str, torch.Tensor], parameter: torch.Tensor | None
) -> torch.Tensor:
    """The noted tensor, of its ``parts``, on the mesh of ``parameter``. Raises Mismatch if it cannot be made."""
    context = values.decode_tree(note.context, _no_reference)
    size, strides = note.outer or (None, None)
    local: Any = _class_of(name, note.kind).__tensor_unflatten__(dict(parts), context, size, strides)
    if note.placements is None:
        return local  # type: ignore[no-any-return]
    from torch.distributed.tensor import DTensor

    if not is_dtensor(parameter):
        raise Mismatch(
            f"{name} was saved as a sharded {note.kind}, here its parameter is not sharded: load it on the mesh"
        )
    shape = torch.Size(note.shape or ())
    return DTensor.from_local(
        local, parameter.device_mesh, _placements(note.placements), run_check=False, shape=shape, stride=_strides(shape)
    )


def dtensor_on(parameter: DTensor, note: TensorNote | None, dtype: str, shape: tuple[int, ...]) -> DTensor:
    """A new DTensor on the mesh of ``parameter``, cut as the note says if the axes are as many, else replicated."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = parameter.device_mesh
    cuts = note.placements if note is not None and note.placements is not None else []
    placements = _placements(cuts) if len(cuts) == mesh.ndim else [Replicate()] * mesh.ndim
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = torch.empty(local_shape, dtype=dtypes.torch_dtype(dtype), device=parameter._local_tensor.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _class_of(name: str, kind: str) -> Any:
    module, _, qualname = kind.partition(":")
    made: Any = sys.modules.get(module)
    for part in qualname.split("."):
        made = getattr(made, part, None)
    if not (isinstance(made, type) and issubclass(made, torch.Tensor) and hasattr(made, "__tensor_unflatten__")):
        raise Mismatch(
            f"{name} was saved as a {kind.replace(':', '.')}, a class that this program has not imported: import "
            f"{module} before the load"
        )
    return made


def _placements(cuts: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if cut is None else Shard(cut) for cut in cuts]


def _noted(note: TensorNote) -> Container:
    return Container(containers.TENSOR, tensor=msgspec.json.encode(note, order="deterministic").decode())


def _no_tensor(tensor: torch.Tensor) -> Any:
    raise values.Refused("", "it holds a tensor")


def _no_reference(reference: str) -> torch.Tensor:
    raise Unsupported("a noted tensor refers to another one")
