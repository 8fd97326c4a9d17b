"""New memory for tensors of a checkpoint that no live tensor takes, laid out as their new owner keeps it here.

The walk gives a `Maker` to each target of an object that takes its state whole. Never makes a tensor on a default
device or in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes, names
from holdfast.ranks.ranks import Ranks
from holdfast.state.kinds import is_dtensor
from holdfast.state.leaves import Made, Saved
from holdfast.state.subclasses import TensorNote, dtensor_on, made_of, read_note
from holdfast.state.tensors import entries_of, placed, stacked_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HOST = torch.device("cpu")


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside are ordinary ones, in any mode and with any default device of the caller."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        # Only where it is needed: within it each call of a tensor goes through Python, half the time of small tensors.
        if torch.empty(0).device != HOST:
            stack.enter_context(HOST)
        yield


class Maker:
    """Makes tensors for the names of one checkpoint, and puts the parts of subclasses together once they are read.

    ``parameter_of(name)`` is the parameter whose state a tensor is, if it is one's; ``device_of(name)`` is where a
    number or a tensor of another shape belongs; ``present`` are the object's own tensors by name, to be laid out alike,
    or to be taken themselves if they are filled ``in_place``. ``on_mesh()`` is a DTensor on the one mesh of the state,
    if there is one: DTensors that nothing here is like are made there.
    """

    def __init__(
        self, saved: Saved, ranks: Ranks, *, parameter_of: Callable[[str], torch.Tensor | None] = lambda name: None,
        device_of: Callable[[str], torch.device | None] = lambda name: None, present: Mapping[str, Any] | None = None,
        in_place: bool = False, on_mesh: Callable[[], DTensor | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._saved, self._ranks, self._parameter_of, self._device_of = saved, ranks, parameter_of, device_of
        self._present, self._in_place, self._on_mesh = present or {}, in_place, on_mesh

    def make(self, name: str, dtype: str, shape: tuple[int, ...]) -> Made:
        """Memory for the saved tensor ``name``. Raises Mismatch if only the mesh of the save can load it."""
        parameter, whole = self._parameter_of(name), self._note(name.rpartition("/")[0])
        if whole is not None and whole.kind:
            return self._part(name, whole, dtype, shape, parameter)
        present = self._present.get(name)
        if present is not None and (self._in_place or not isinstance(present, torch.Tensor)):  # a `Shard` is its memory
            entries = entries_of(name, present, self._ranks)
            if any(entry.name == name and entry.shape != shape for entry in entries):
                raise Mismatch(f"{name}: saved with shape {list(shape)}, here {list(entries[0].shape)}")
            return Made(present, entries)
        tensor = self._laid_out(name, dtype, shape, parameter)
        return Made(tensor, entries_of(name, tensor, self._ranks))

    def assemble(self, leaves: dict[str, Any]) -> None:
        """Replace the parts of each noted subclass in ``leaves``, tensors by name, by the tensor that they are of."""
        for name in {name.rpartition("/")[0] for name in leaves}:
            note = self._note(name)
            if note is not None and note.kind:
                below = f"{name}/"
                parts = {key.removeprefix(below): leaves.pop(key) for key in list(leaves) if key.startswith(below)}
                leaves[name] = made_of(name, note, parts, self._parameter_of(name))

    def _note(self, name: str) -> TensorNote | None:
        return read_note(self._saved.containers.get(name))

    def _part(
        self, name: str, note: TensorNote, dtype: str, shape: tuple[int, ...], parameter: torch.Tensor | None
    ) -> Made:
        device = HOST if parameter is None else parameter.device
        if note.placements is None:
            part = torch.empty(shape, dtype=dtypes.torch_dtype(dtype), device=device)
            return Made(part, entries_of(name, part, self._ranks))

        def fault(here: str) -> Mismatch:
            return Mismatch(
                f"{name} was saved in {shape[0]} shards, each quantised on its own by the optimizer; {here}: load it "
                "on as many shards, or leave the optimizer out by only="
            )

        if not is_dtensor(parameter):
            raise fault("its parameter here is not sharded")
        part = torch.empty(shape[1:], dtype=dtypes.torch_dtype(dtype), device=parameter._local_tensor.device)
        spread, position = placed(name, parameter, self._ranks)
        entry = stacked_part(name, part, spread, position)
        if entry.shape != shape:
            raise fault(f"here are {entry.shape[0]}")
        return Made(part, [entry])

    def _laid_out(self, name: str, dtype: str, shape: tuple[int, ...], parameter: torch.Tensor | None) -> torch.Tensor:
        like = parameter if parameter is not None else self._present.get(name)
        kind, note = dtypes.torch_dtype(dtype), self._note(name)
        if like is None and note is not None and note.placements is not None and self._ranks.size > 1:
            on_mesh = self._on_mesh()
            if on_mesh is None or on_mesh.device_mesh.ndim != len(note.placements):
                raise Mismatch(
                    f"{name} was saved as a DTensor, and nothing here says on which mesh it lies: load after a step "
                    "was taken, or in one process"
                )
            return dtensor_on(on_mesh, note, dtype, shape)
        if note is not None and note.strides is not None and not is_dtensor(like):
            device = like.device if like is not None and not like.is_meta else HOST
            return torch.empty_strided(shape, note.strides, dtype=kind, device=device)
        known = is_dtensor(like) or type(like) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if known and like is not None and tuple(like.shape) == shape and shape and not like.is_meta:
            return torch.zeros_like(like.detach(), dtype=kind)
        if is_dtensor(like) and (prod(shape) > 1 or note is not None):  # a plain number stays one
            return dtensor_on(like, note, dtype, shape)
        device = self._device_of(name) or (like.device if isinstance(like, torch.Tensor) and not like.is_meta else HOST)
        return torch.empty(shape, dtype=kind, device=device)


def key_of(name: str, below: str) -> str:
    """The first key of ``name`` below the name ``below``."""
    return names.unescape(name[len(below) + 1 :].partition("/")[0])
