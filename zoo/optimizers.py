"""Optimizers of torch itself, one case for each way to make one.

`zoo.__main__` collects `cases`. The optimizers of other libraries are in `optimizers_of_libraries`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from zoo import training
from zoo.case import Case, Lay, Run
from zoo.own_optimizers import Accumulating, Counting, Float8, Global, Hooked
from zoo.training import Matrices, named, trained

Make = Callable[[nn.Module], Any]

_PLAIN: dict[str, dict[str, dict[str, Any]]] = {
    "Adadelta": {"": {}, "foreach": {"foreach": True}},
    "Adafactor": {"": {}, "beta2_decay": {"beta2_decay": -0.5}, "foreach": {"foreach": True}},
    "Adagrad": {"": {}, "fused": {"fused": True}, "lr_decay": {"lr_decay": 0.1}, "foreach": {"foreach": True}},
    "Adam": {
        "": {}, "amsgrad": {"amsgrad": True}, "fused": {"fused": True}, "foreach": {"foreach": True},
        "maximize": {"maximize": True}, "fused amsgrad": {"fused": True, "amsgrad": True},
        "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    },
    "AdamW": {"": {}, "amsgrad": {"amsgrad": True}, "fused": {"fused": True}, "foreach": {"foreach": True}},
    "Adamax": {"": {}, "foreach": {"foreach": True}},
    "ASGD": {"": {}, "foreach": {"foreach": True}},
    "NAdam": {"": {}, "decoupled": {"decoupled_weight_decay": True}, "foreach": {"foreach": True}},
    "RAdam": {"": {}, "decoupled": {"decoupled_weight_decay": True}, "foreach": {"foreach": True}},
    "RMSprop": {"": {}, "centered": {"centered": True, "momentum": 0.9}, "foreach": {"foreach": True}},
    "Rprop": {"": {}, "foreach": {"foreach": True}},
    "SGD": {
        "": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True},
        "fused": {"fused": True, "momentum": 0.9}, "foreach": {"foreach": True, "momentum": 0.9},
    },
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    for name, variants in _PLAIN.items():
        for variant, options in variants.items():
            yield _case(f"{name}{f' {variant}' if variant else ''}", _of_class(name, {"lr": 0.01, **options}))
    for name in ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "RMSprop"):
        yield _case(f"{name} with a tensor lr", _of_class(name, {}, lr_tensor=True))
    yield _case("Adam with tensor betas", _tensor_betas)
    yield _case("Muon", lambda m: torch.optim.Muon(trained(m), lr=0.01), models=(Matrices,))
    yield _case("LBFGS", lambda m: torch.optim.LBFGS(trained(m), lr=0.1, max_iter=3), drive=training.with_closure)
    yield _case(
        "LBFGS strong Wolfe", drive=training.with_closure,
        make=lambda m: torch.optim.LBFGS(trained(m), max_iter=3, line_search_fn="strong_wolfe"),
    )  # fmt: skip
    yield Case("torch: SparseAdam", "torch", _sparse, sharded=False)
    yield from _groups()
    yield from _several()
    yield from _dtypes()
    yield from _around()


def _case(name: str, make: Make, **options: Any) -> Case:
    return Case(f"torch: {name}", "torch", lambda lay: training.training(make, lay, **options))


def _of_class(name: str, options: dict[str, Any], *, lr_tensor: bool = False) -> Make:
    def make(model: nn.Module) -> Any:
        lr = {"lr": torch.tensor(0.01)} if lr_tensor else {}
        return getattr(torch.optim, name)(trained(model), **options, **lr)

    return make


def _tensor_betas(model: nn.Module) -> Any:
    return torch.optim.Adam(
        trained(model), lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    )


def _sparse(lay: Lay) -> Run:
    model = nn.Embedding(12, 6, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def step(number: int) -> Any:
        loss = model(torch.arange(number % 7, number % 7 + 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), model.weight.detach().clone()]

    return Run({"model": model, "optimizer": optimizer}, step)


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    tall = [p for p in trained(model) if p.dim() > 1]
    flat = [p for p in trained(model) if p.dim() <= 1]
    return [
        {"params": tall, "weight_decay": 0.1, "name": "decayed"},
        {"params": flat, "weight_decay": 0.0, "name": "not"},
    ]


def _groups() -> Iterator[Case]:
    adam = torch.optim.AdamW
    yield _case("AdamW in two groups", lambda m: adam(_decayed(m), lr=0.01))
    yield _case(
        "AdamW in a group for each parameter",
        lambda m: adam([{"params": [p], "lr": 0.001 * (i + 1)} for i, p in enumerate(trained(m))]),
    )
    yield _case("AdamW of named parameters", lambda m: adam(named(m), lr=0.01))
    yield _case("AdamW with all parameters, frozen ones too", lambda m: adam(m.parameters(), lr=0.01))
    yield _case("AdamW with an empty group", lambda m: adam([*_decayed(m), {"params": [], "lr": 0.5}], lr=0.01))
    yield _case("AdamW with tensors in a group", _with_tensors)
    yield _case("AdamW with objects in a group", _with_objects)
    yield _case("AdamW with a group added later", _added_later)
    yield _case(
        "SGD whose groups are turned round",
        lambda m: torch.optim.SGD(list(reversed(_decayed(m))), lr=0.1, momentum=0.9),
    )
    yield _case("Adam of some parameters", lambda m: torch.optim.Adam(trained(m)[:2], lr=0.01))


def _with_tensors(model: nn.Module) -> Any:
    groups = _decayed(model)
    groups[0] |= {"mask": torch.tensor([1.0, 0.0, 2.0]), "scales": [torch.tensor(0.5), torch.randn(2)]}
    return torch.optim.AdamW(groups, lr=0.01)


def _with_objects(model: nn.Module) -> Any:
    groups = _decayed(model)
    groups[0] |= {"names": {"a", "b"}, "shape": (1, 2), "nothing": None, "nested": {"a": [1, (2.0, "x")]}}
    return torch.optim.AdamW(groups, lr=0.01)


def _added_later(model: nn.Module) -> Any:
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters[:2], lr=0.01)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.02})
    return optimizer


def _several() -> Iterator[Case]:
    def matrices_and_rest(model: nn.Module) -> tuple[Any, Any]:
        tall = [p for p in trained(model) if p.dim() == 2]
        flat = [p for p in trained(model) if p.dim() != 2]
        return torch.optim.SGD(tall, lr=0.1, momentum=0.9), torch.optim.AdamW(flat, lr=0.01)

    yield _case("two optimizers in a list", lambda m: list(matrices_and_rest(m)), models=(training.Odd,))
    yield _case(
        "two optimizers in a dict", lambda m: dict(zip("ab", matrices_and_rest(m), strict=True)), models=(training.Odd,)
    )
    yield _case(
        "an optimizer for each parameter, in a list", lambda m: [torch.optim.Adam([p], lr=0.01) for p in trained(m)]
    )
    yield _case(
        "an optimizer for each parameter, by name", lambda m: {n: torch.optim.Adam([p], lr=0.01) for n, p in named(m)}
    )
    yield Case("torch: Adam of tensors without a module", "torch", _of_tensors, sharded=False)
    yield Case("torch: Adam whose model is not saved", "torch", _alone)


def _of_tensors(lay: Lay) -> Run:
    weights = [torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    optimizer = torch.optim.Adam(weights, lr=0.1)

    def step(number: int) -> Any:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        (x @ weights[0] + weights[1]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [w.detach().clone() for w in weights]

    return Run({"weights": weights, "optimizer": optimizer}, step)


def _alone(lay: Lay) -> Run:
    run = training.training(_of_class("Adam", {"lr": 0.01}), lay, models=(training.Common,), drive=training.usual)
    model = run.state["model"]
    kept = [training.local(p).detach().clone() for p in model.parameters()]

    def step(number: int) -> Any:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                training.local(parameter).copy_(value * 0 + 0.01)
        return run.step(number)

    return Run({"optimizer": run.state["optimizer"]}, step)


def _dtypes() -> Iterator[Case]:
    for name, options in (("Adam", {}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9}), ("Adafactor", {})):
        variant = " fused" if options.get("fused") else ""
        yield _case(f"{name}{variant} in bfloat16", _of_class(name, {"lr": 0.01, **options}), dtype=torch.bfloat16)
    yield _case("Adam in float64", _of_class("Adam", {"lr": 0.01}), dtype=torch.float64)
    yield _case("Adam with float32 state of bfloat16 parameters", _wide_state, dtype=torch.bfloat16)


def _wide_state(model: nn.Module) -> Any:
    optimizer = torch.optim.Adam(trained(model), lr=0.01, foreach=False)

    def widen(optimizer: Any, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            state["master"] = state.get("master", state["exp_avg"].float()) * 0.9

    optimizer.register_step_post_hook(widen)
    return optimizer


def _around() -> Iterator[Case]:
    yield _case("a wrapper that accumulates", lambda m: Accumulating(torch.optim.Adam(trained(m), lr=0.01)))
    yield _case("gradients accumulated over 2 steps", _of_class("Adam", {"lr": 0.01}), drive=training.with_several(2))
    yield _case("a subclass with one more key", lambda m: Counting(trained(m), lr=0.01))
    yield _case("a subclass with hooks of its state dict", lambda m: Hooked(trained(m), 0.01))
    yield _case("an optimizer with state of its own", lambda m: Global(trained(m)))
    yield _case("an optimizer with float8 state", lambda m: Float8(trained(m)))
    yield _case("AdamW and AveragedModel", _of_class("AdamW", {"lr": 0.01}), more=_averaged(None))
    yield _case(
        "AdamW and AveragedModel EMA", _of_class("AdamW", {"lr": 0.01}),
        more=_averaged(swa_utils.get_ema_multi_avg_fn(0.9)),
    )  # fmt: skip
    yield _case("SGD and SWALR", _of_class("SGD", {"lr": 0.1}), more=_swalr)
    yield Case("torch: ZeroRedundancyOptimizer", "torch", _zero)
    yield Case("torch: PostLocalSGDOptimizer", "torch", _post_local)


def _averaged(average: Any) -> Callable[[nn.Module, Any], dict[str, Any]]:
    def more(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        mean = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        optimizer.register_step_post_hook(lambda *_: mean.update_parameters(model))
        return {"mean": mean}

    return more


def _swalr(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return {"scheduler": scheduler}


def _with_group(make: Make) -> Callable[[Lay], Run]:
    """For optimizers that ask for a process group even where there is one rank."""

    def build(lay: Lay) -> Run:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        gathers = make.__name__ == "_zero"
        drive = training.then_consolidated if gathers else training.usual
        return training.training(make, lambda model: model, models=(training.Common,), drive=drive)

    return build


@_with_group
def _zero(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(trained(model), torch.optim.AdamW, lr=0.01)


@_with_group
def _post_local(model: nn.Module) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(torch.optim.SGD(trained(model), lr=0.1, momentum=0.9), PeriodicModelAverager(period=2))
