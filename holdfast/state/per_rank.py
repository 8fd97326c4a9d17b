"""Values that differ by rank: `PerRank`, and `RNG`, the random generators of a rank.

Users put them into a state; the table turns them into a `leaf`. Never compared between ranks.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from holdfast.errors import Unsupported
from holdfast.ondisk import values
from holdfast.ondisk.arguments import Takes
from holdfast.state.leaves import PerRankLeaf
from holdfast.state.tensors import dtype_name

Elsewhere = Literal["error", "first"] | Callable[[Sequence[Any], int, int], Any]
"""What a rank gets on another world size: nothing (an error), rank 0's value, or ``f(values, rank, world_size)``."""


_ELSEWHERE = Takes(
    '"error", "first" or a function f(values, rank, world_size)',
    lambda value: isinstance(value, str) or callable(value),
    lambda value: callable(value) or value in ("error", "first"),
)


@dataclass
class PerRank:
    """A value, or an object with ``state_dict`` and ``load_state_dict``, of which every rank has its own.

    On the same world size each rank gets its own back: ``value`` is replaced, or the object loaded.

    Args:
        value: A plain value, or the object.
        elsewhere: What a rank gets on another world size. ``"error"`` raises Mismatch, ``"first"`` gives every rank the
            value of rank 0, and a function ``f(values, rank, world_size)`` makes it from the values of all saved ranks,
            in rank order.

    Example:
        >>> state = {"model": model, "seen": holdfast.PerRank(12_000, elsewhere="first")}
    """

    value: Any
    elsewhere: Elsewhere = "error"

    def __post_init__(self) -> None:
        _ELSEWHERE.check("elsewhere", self.elsewhere)

    def state(self) -> Any:
        """Return what is saved."""
        return self.value.state_dict() if is_stateful(self.value) else self.value

    def put(self, value: Any) -> None:
        """Take a saved value back.

        Args:
            value: What `state` returned at the save.
        """
        if is_stateful(self.value):
            self.value.load_state_dict(value)
        else:
            self.value = value


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def leaf(path: str, value: Any, put: Callable[[Any], None], elsewhere: Elsewhere) -> PerRankLeaf:
    """The leaf of a value that differs by rank. Raises Unsupported, naming what a checkpoint does not keep."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise values.Refused("", f"a {type(tensor).__qualname__} inside of a PerRank value")
        try:
            dtype_name("it", tensor)
        except Unsupported as error:  # it has no plain bytes
            raise values.Refused("", str(error)) from None
        reference = str(len(tensors))
        tensors[reference] = tensor.detach()
        return reference

    try:
        return PerRankLeaf(path, values.encode_tree(value, keep), tensors, put, elsewhere)
    except values.Refused as error:
        raise Unsupported(f"{path}{error.path}: {error.reason}") from None


def no_rule(path: str, elsewhere: object, saved_world: int, world: int) -> list[str]:
    """Why a value saved by ``saved_world`` ranks cannot be loaded on ``world`` ranks, if it cannot."""
    if saved_world == world or elsewhere == "first" or callable(elsewhere):
        return []
    return [
        f"{path}: saved by {saved_world} ranks, each with its own value, and loaded by {world}; say what they get with "
        'PerRank(value, elsewhere="first") or elsewhere=f(values, rank, world_size), or leave it out by only='
    ]


def choose(elsewhere: object, value_of: Callable[[int], Any], saved_world: int, rank: int, world: int) -> Any:
    """The value that ``rank`` of ``world`` gets, where ``value_of(r)`` fetches what rank r of ``saved_world`` saved."""
    if saved_world == world:
        return value_of(rank)
    if elsewhere == "first":
        return value_of(0)
    if not callable(elsewhere):
        raise TypeError(f'elsewhere is "error", "first" or a function, not {elsewhere!r}')
    return elsewhere([value_of(r) for r in range(saved_world)], rank, world)


@dataclass
class RNG:
    """The random generators of this rank: Python's, NumPy's if it is imported, torch's on the CPU and on devices in
    use.

    Put one into the state. On another world size, a rank that existed at the save goes on with its own streams. A new
    rank gets streams that are seeded from rank 0's state and its own number: no two ranks draw the same, and the same
    restart draws the same. Anything that draws numbers after the restore and did not at the save puts the streams out
    of step, such as a loader's iterator that is made in the middle of an epoch; `rewind` mends that.

    Args:
        elsewhere: What a rank gets on another world size, as in `PerRank`, in the place of the rule above.

    Example:
        >>> state = {"model": model, "rng": holdfast.RNG()}
    """

    elsewhere: Elsewhere | None = None
    _loaded: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators, in plain values."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _bytes_of(torch.get_rng_state())}
        numpy = _numpy()
        if numpy is not None:
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [kind, keys.tobytes(), int(position), int(has_gauss), float(cached)]
        accelerator = _accelerator()
        # Generators of an unused device have drawn nothing, and asking for them would take memory there.
        if accelerator is not None and getattr(accelerator, "is_initialized", lambda: True)():
            state["devices"] = [_bytes_of(accelerator.get_rng_state(i)) for i in range(accelerator.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators.

        Args:
            state: What `state_dict` returned.
        """
        self._loaded = state
        numpy = _numpy()
        if "seed" in state:
            random.seed(state["seed"])
            torch.manual_seed(state["seed"])
            if numpy is not None:
                numpy.random.seed(state["seed"] % (1 << 32))
            return
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if numpy is not None and "numpy" in state:
            kind, keys, position, has_gauss, cached = state["numpy"]
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype="uint32"), position, has_gauss, cached))
        accelerator = _accelerator()
        if accelerator is not None:
            for i, saved in enumerate(state.get("devices", [])[: accelerator.device_count()]):
                accelerator.set_rng_state(_byte_tensor(saved), i)

    def rewind(self) -> None:
        """Set the generators once more to what was last loaded; nothing happens if nothing was."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def rule(self) -> Elsewhere:
        """The rule for another world size."""
        return self.elsewhere if self.elsewhere is not None else _own_or_seeded


def _own_or_seeded(values: Sequence[Any], rank: int, world_size: int) -> Any:
    if rank < len(values):
        return values[rank]
    text = hashlib.sha256(values[0]["torch"] + f"rank {rank} of {world_size}".encode()).digest()
    return {"seed": int.from_bytes(text[:8], "little") >> 1}


def _bytes_of(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _numpy() -> Any:
    # Only a program that has imported NumPy can have drawn from it; importing it here would cost every save.
    return sys.modules.get("numpy")


def _accelerator() -> Any:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = getattr(torch, kind.type, None) if kind is not None else None
    return module if hasattr(module, "get_rng_state") else None
