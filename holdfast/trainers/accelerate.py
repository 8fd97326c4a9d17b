"""holdfast in a loop of Hugging Face Accelerate: everything that an Accelerator knows, as one state.

Users call `state_of` and hand the state to a `CheckpointManager`, to `save` or to `load`, or they call `attach` and
leave their calls of `save_state` and `load_state` as they are. Never gathers a sharded tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Unsupported
from holdfast.ranks.ranks import DEADLINE
from holdfast.state import RNG, PerRank
from holdfast.trainers.batches import Position

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from holdfast.trainers.accelerate_states import States
except ImportError as error:
    raise ImportError("holdfast.trainers.accelerate needs accelerate: pip install accelerate") from error

_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def state_of(
    accelerator: Accelerator, *, also: Mapping[str, Any] | None = None, loaders: bool = True
) -> dict[str, Any]:
    """The state of a loop: all that was prepared by ``accelerator`` or registered with it for checkpointing.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        state = state_of(accelerator, also={"step": 0})
        manager = holdfast.CheckpointManager("/ckpt/run1", every=500)
        manager.restore(state)  # in place: go on with epoch_of(loader) and state["step"]

    Call it once, after `prepare`. The first of each kind is called ``model``, ``optimizer``, ``scheduler``, ``loader``
    and ``custom``, others ``model_1`` and so on; then there are ``scaler``, ``rng`` and ``accelerator`` (its count of
    micro-batches). ``also`` adds objects and values of your own.

    With ``loaders`` a loader goes on after the batches that it had given out, see `Position`.

    Raises Unsupported if the Accelerator leaves the state to an engine (DeepSpeed, Megatron-LM, XLA), or a loader
    cannot be resumed.
    """
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name, None) for name in _ENGINES]:
        raise Unsupported(
            f"an Accelerator with {kind.value} keeps its state in an engine: hand that to holdfast instead"
        )
    state: dict[str, Any] = {}
    _number(state, "model", accelerator._models)
    _number(state, "optimizer", [getattr(wrapper, "optimizer", wrapper) for wrapper in accelerator._optimizers])
    _number(state, "scheduler", [getattr(wrapper, "scheduler", wrapper) for wrapper in accelerator._schedulers])
    if loaders:
        _number(state, "loader", [_position_of(loader) for loader in accelerator._dataloaders])
    _number(state, "custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _MicroBatches(accelerator)
    state["rng"] = RNG()
    taken = sorted(state.keys() & (also or {}).keys())
    if taken:
        raise ValueError(f"also={{{taken[0]!r}: …}} has a name that the state of an Accelerator has already")
    return {**state, **(also or {})}


def attach(accelerator: Accelerator, *, loaders: bool = False, deadline: float = DEADLINE) -> Accelerator:
    """Let ``accelerator.save_state`` and ``accelerator.load_state`` go through holdfast; returns the Accelerator.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        attach(accelerator)
        accelerator.load_state()  # the newest automatic checkpoint, whether holdfast or accelerate saved it
        accelerator.save_state()

    Call it once, after `prepare`. What is saved is what `state_of` gives; folders, automatic naming, ``total_limit``
    and hooks are accelerate's. `save_state` returns once the checkpoint is committed. It may be called between two
    steps of the optimizer, and not between two micro-batches of one.

    As with accelerate alone, a loader starts its epoch over after a load, and scripts call ``skip_first_batches``; a
    ``StatefulDataLoader`` goes on by itself. With ``loaders`` every loader goes on by itself, see `Position`.

    Raises Unsupported for what `state_of` refuses.
    """

    def watched() -> list[Any]:
        prepared = accelerator._dataloaders
        return [one for one in prepared if loaders or getattr(one, "use_stateful_dataloader", False)]

    positions = {id(loader): _position_of(loader) for loader in watched()}

    def state() -> dict[str, Any]:
        if any(id(loader) not in positions for loader in watched()):
            raise Unsupported("a loader was prepared after attach(accelerator): call attach after accelerator.prepare")
        values = state_of(accelerator, loaders=False)
        _number(values, "loader", [positions[id(loader)] for loader in watched()])
        return values

    state_of(accelerator, loaders=False)
    states = States(accelerator, state, deadline)
    accelerator.save_state, accelerator.load_state = states.save_state, states.load_state
    return accelerator


def epoch_of(loader: Any) -> int:
    """The epoch, from 0, that the next iteration over a prepared ``loader`` is of: after a load, where it goes on."""
    position = loader.__dict__.get("_holdfast_position")
    return position.epoch if position is not None else int(loader.iteration)


def _number(into: dict[str, Any], name: str, objects: list[Any]) -> None:
    into.update({name if not number else f"{name}_{number}": one for number, one in enumerate(objects)})


def _position_of(loader: Any) -> PerRank:
    position = Position.of(loader)
    return PerRank(position, elsewhere=position.elsewhere)


class _MicroBatches:
    """How far gradient accumulation is. Gradients are in no checkpoint, so between two steps nothing can be saved."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        if not self._accelerator.sync_gradients:
            raise Unsupported(
                "a state was to be saved or loaded between two micro-batches of one optimizer step, and gradients are "
                "in no state: call the manager where accelerator.sync_gradients is true. To go back to a saved step "
                "from here, drop what was accumulated: accelerator.sync_gradients = True, then optimizer.zero_grad()"
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
