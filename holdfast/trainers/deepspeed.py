"""DeepSpeed: the state of an engine, ZeRO 0 to 3, as named tensors in shards.

Put what `engine_state` returns into your state. It never gathers a partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.errors import Unsupported
from holdfast.state import FlatShard

try:
    import deepspeed  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError("holdfast.trainers.deepspeed needs DeepSpeed: pip install deepspeed") from error

_ONE_BIT = {"OnebitAdam", "OnebitLamb", "ZeroOneAdam"}
_ZERO_PLUS_PLUS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def engine_state(engine: Any) -> dict[str, Any]:
    """What of a DeepSpeed engine is to be saved: ``model``, ``optimizer``, ``scheduler`` and ``engine``.

        state = {**engine_state(engine), "rng": holdfast.RNG(), "step": 0}
        manager.restore(state)

    Weights lie under ``model/<name>``, the optimizer's state under ``optimizer/state/<name>/<key>``, and, where the
    weights are not float32, the masters that the optimizer works on under ``optimizer/state/<name>/fp32``: each rank
    its own stretch of each parameter. So a checkpoint may be loaded on another number of ranks and by another stage of
    ZeRO. ``engine`` holds counters and the loss scaler; it sets right, after a load, what DeepSpeed keeps twice.

    Call it once the engine is made, on every rank. Save between an ``engine.step()`` that was the end of an
    accumulation and the next ``engine.backward()``. Raises Unsupported, naming it, for what is not known: a pipeline
    or a tensor parallel engine, experts, offloading to disk, ZeRO++, one-bit optimizers, and wrappers other than those
    of ZeRO 1, 2 and 3.
    """
    if type(engine).__name__ != "DeepSpeedEngine":
        raise Unsupported(f"a {type(engine).__name__} is not known, only a plain DeepSpeedEngine")
    unknown = _unknown(engine)
    if unknown:
        raise Unsupported(f"an engine with {', '.join(unknown)} is not known: use DeepSpeed's own save_checkpoint")
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    state: dict[str, Any] = {"engine": _Engine(engine)}
    if engine.lr_scheduler is not None:
        state["scheduler"] = engine.lr_scheduler
    if isinstance(optimizer, torch.optim.Optimizer) and stage == 0:
        return {"model": engine.module, "optimizer": optimizer, **state}
    # By their very types: classes made from these (MiCS, ZenFlow, SuperOffload) keep more, or keep it elsewhere.
    if type(optimizer).__name__ == "DeepSpeedZeroOptimizer":
        return {"model": engine.module, "optimizer": _Zero(engine), **state}
    if type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        return {"model": _weights(engine), "optimizer": _Zero(engine), **state}
    raise Unsupported(
        f"the optimizer of this engine is a {type(optimizer).__name__}: known are ZeRO 1, 2 and 3, and a plain one"
    )


def _unknown(engine: Any) -> list[str]:
    """What this engine does that leaves state where it is not looked for, by the names of DeepSpeed's settings."""
    zero = engine._config.zero_config
    unknown = [
        f"{name} to nvme"
        for name in ("offload_optimizer", "offload_param")
        for setting in [getattr(zero, name, None)]
        if setting is not None and getattr(setting.device, "value", setting.device) == "nvme"
    ]
    unknown += [f"{name} (ZeRO++)" for name in _ZERO_PLUS_PLUS if getattr(zero, name, False)]
    if getattr(zero, "zero_hpz_partition_size", 1) > 1:
        unknown.append("zero_hpz_partition_size (ZeRO++)")
    kinds = {type(optimizer).__name__ for optimizer in (engine.optimizer, getattr(engine.optimizer, "optimizer", None))}
    unknown += [f"{name}, a one-bit optimizer" for name in sorted(kinds & _ONE_BIT)]
    tensor_parallel = getattr(engine._config, "tensor_parallel_config", None)
    if getattr(tensor_parallel, "autotp_size", 0) > 1:
        unknown.append("tensor_parallel")
    if engine.has_moe_layers:
        unknown.append("experts (deepspeed.moe)")
    return unknown


class _Piece(NamedTuple):
    """What a flat partition holds of a parameter: ``numel`` elements from ``at`` on, from ``start`` on in it."""

    name: str
    shape: tuple[int, ...]
    start: int
    at: int
    numel: int

    def of(self, flat: torch.Tensor) -> FlatShard:
        return FlatShard(flat.detach().view(-1)[self.at : self.at + self.numel], self.shape, self.start)


def _names(engine: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in engine.module.named_parameters()}


def _groups(engine: Any) -> Iterator[tuple[int, torch.Tensor, list[_Piece]]]:
    """Each flat fp32 partition of this rank with its group of the optimizer and what lies in it."""
    optimizer, names = engine.optimizer, _names(engine)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            pieces = []
            for parameter in optimizer.bit16_groups[index]:
                shape, mapping = tuple(parameter.shape), parameter._hp_mapping
                where = (0, 0, 0)
                if mapping is not None:
                    here = mapping.hp_fragment_address
                    where = mapping.lp_fragment_address.start, here.start, here.numel
                pieces.append(_Piece(names[id(parameter)], shape, *where))
            yield index, flat, pieces
        return
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        pieces, at = [], 0
        for parameter in optimizer.fp16_groups[index]:
            start, numel = _share(parameter)
            pieces.append(_Piece(names[id(parameter)], tuple(parameter.ds_shape), start, at, numel))
            at += parameter.partition_numel()
        yield optimizer.sub_group_to_group_id[index], flat, pieces


def _share(parameter: Any) -> tuple[int, int]:
    """ZeRO 3: where this rank's share of a parameter begins, and its length without what fills it up."""
    whole, length = prod(parameter.ds_shape), parameter.partition_numel()
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * length, whole)
    return start, min(length, whole - start)


def _weights(engine: Any) -> dict[str, Any]:
    """ZeRO 3: the module's parameters as this rank's shares of them, and its buffers."""
    weights: dict[str, Any] = dict(engine.module.named_buffers())
    for name, parameter in engine.module.named_parameters():
        start, numel = _share(parameter)
        weights[name] = FlatShard(parameter.ds_tensor.detach().view(-1)[:numel], tuple(parameter.ds_shape), start)
    return weights


class _Zero:
    """The optimizer of ZeRO 1, 2 or 3, by parameter name."""

    holdfast_fills_in_place = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._room: dict[int, dict[str, Any]] = {}

    @property
    def _base(self) -> torch.optim.Optimizer:
        base = self._engine.optimizer.optimizer
        assert isinstance(base, torch.optim.Optimizer)
        return base

    def _state_of(self, group: int, flat: torch.Tensor) -> dict[str, Any]:
        """The state of a partition; of one that was never stepped, room for it that is not the optimizer's yet."""
        if self._base.state.get(flat):
            return dict(self._base.state[flat])
        if id(flat) not in self._room:
            like = torch.zeros_like(flat, requires_grad=True)
            like.grad = torch.zeros_like(flat)
            takes = signature(type(self._base)).parameters
            settings = {k: v for k, v in self._base.param_groups[group].items() if k in takes and k != "params"}
            trial = type(self._base)([like], **settings)
            trial.step()
            self._room[id(flat)] = {
                key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
                for key, value in trial.state[like].items()
            }
        return self._room[id(flat)]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        names: dict[int, list[str]] = {}
        for group, flat, pieces in _groups(self._engine):
            held = self._state_of(group, flat)
            names.setdefault(group, []).extend(piece.name for piece in pieces)
            for piece in pieces:
                state[piece.name] = {
                    key: piece.of(value) if isinstance(value, torch.Tensor) and value.shape == flat.shape else value
                    for key, value in held.items()
                }
                if self._has_masters:
                    state[piece.name]["fp32"] = piece.of(flat)
        groups = [
            {**{k: v for k, v in settings.items() if k != "params"}, "params": names.get(group, [])}
            for group, settings in enumerate(self._base.param_groups)
        ]
        return {"state": state, "param_groups": groups}

    @property
    def _has_masters(self) -> bool:
        return any(p.dtype != torch.float32 for p in self._engine.module.parameters())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tensors were filled where they lie; what is left are settings, and numbers that are no tensors."""
        for group, flat, pieces in _groups(self._engine):
            held = self._state_of(group, flat)
            for key, value in held.items():
                if not isinstance(value, torch.Tensor) and pieces:
                    held[key] = state["state"][pieces[0].name][key]
            self._base.state[flat] = held
        self._room = {}
        for live, saved in zip(self._base.param_groups, state["param_groups"], strict=True):
            live.update((key, value) for key, value in saved.items() if key != "params")


class _Engine:
    """The counters and the loss scaler of an engine; loaded last, it makes what is kept twice equal again."""

    holdfast_fills_in_place = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        plain = {k: v for k, v in vars(scaler).items() if type(v) in (int, float, bool)} if scaler is not None else {}
        return {**{name: int(getattr(self._engine, name)) for name in _COUNTS}, "loss_scaler": plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self._engine, name, state[name])
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is not None:
            vars(scaler).update(state["loss_scaler"])
        _refresh(self._engine.optimizer)


def _refresh(optimizer: Any) -> None:
    """Bring weights that DeepSpeed holds in two places in line with those that were loaded."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        if all(p.dtype == torch.float32 for group in optimizer.bit16_groups for p in group):
            optimizer.refresh_fp32_params()  # masters are the weights: one of both was saved
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for flat, weights in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            if flat.dtype == weights.dtype and flat.data_ptr() != weights.data_ptr():
                flat.data.copy_(weights.data)
        kept = optimizer.persistent_parameters  # small ones, gathered all the time
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)
