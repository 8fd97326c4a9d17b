"""Optimizers around optimizers: SAM, Lookahead, schedule-free wrappers, mechanic, differential privacy, EMA of weights.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo import training
from zoo.case import Case, Lay, Run
from zoo.optimizers_of_libraries import module_of
from zoo.training import trained

Make = Callable[[Any, nn.Module], Any]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=0.01)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


def _safe(lib: Any, model: nn.Module) -> Any:
    return lib.SafeFP16Optimizer(_adam(model))


def _safe_step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    loss = training.loss_of(model, number)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _gsam(lib: Any, model: nn.Module) -> Any:
    base = _sgd(model)
    rho = lib.ProportionScheduler(
        lib.LinearScheduler(base, t_max=50, max_lr=0.1), max_lr=0.1, min_lr=0.0, max_value=0.1, min_value=0.01
    )
    return lib.GSAM(trained(model), base, model, rho)


def _gsam_step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, training.WORDS, (4, 6), generator=generator)
    wanted = torch.randint(0, training.CLASSES, (4, 6), generator=generator)
    optimizer.set_closure(lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()), tokens, wanted)
    _, loss = optimizer.step()
    optimizer.update_rho_t()
    return loss.detach()


def _in_train_mode(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


_PYTORCH_OPTIMIZER: dict[str, tuple[Make, dict[str, Any]]] = {
    "SAM": (lambda lib, m: lib.SAM(trained(m), torch.optim.AdamW, lr=0.01), {"drive": training.in_two_steps}),
    "SAM by closure": (lambda lib, m: lib.SAM(trained(m), torch.optim.SGD, lr=0.1, momentum=0.9),
    {"drive": training.with_closure}),
    "FriendlySAM": (lambda lib, m: lib.FriendlySAM(trained(m), torch.optim.AdamW, lr=0.01),
    {"drive": training.in_two_steps}),
    "LookSAM": (lambda lib, m: lib.LookSAM(trained(m), torch.optim.AdamW, lr=0.01, k=2),
    {"drive": training.with_closure}),
    "WSAM": (lambda lib, m: lib.WSAM(m, trained(m), torch.optim.AdamW, lr=0.01), {"drive": training.with_closure}),
    "GSAM": (_gsam, {"drive": _gsam_step}),
    "Lookahead": (lambda lib, m: lib.Lookahead(_adam(m), k=2), {}),
    "Lookahead pulling back": (lambda lib, m: lib.Lookahead(_sgd(m), k=2, pullback_momentum="pullback"), {}),
    "OrthoGrad": (lambda lib, m: lib.OrthoGrad(_adam(m)), {}),
    "TRAC": (lambda lib, m: lib.TRAC(_adam(m)), {}),
    "Magma": (lambda lib, m: lib.Magma(_adam(m)), {}),
    "ScheduleFreeWrapper": (lambda lib, m: _in_train_mode(lib.ScheduleFreeWrapper(_sgd(m))), {}),
    "SafeFP16Optimizer": (_safe, {"drive": _safe_step}),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All wrappers of the libraries that are here."""
    if (lib := module_of("pytorch_optimizer")) is not None:
        for name, (make, how) in _PYTORCH_OPTIMIZER.items():
            yield _case("pytorch_optimizer", name, partial(make, lib), **how)
    if (lib := module_of("heavyball")) is not None:
        yield _case(
            "heavyball", "SAMWrapper", lambda m, lib=lib: lib.SAMWrapper(trained(m), lib.AdamW(trained(m), lr=0.01)),
            drive=training.with_closure,
        )  # fmt: skip
        yield _case("heavyball", "SplitOpt", partial(_split, lib), models=(training.Common,))
    if (lib := module_of("schedulefree")) is not None:
        yield _case(
            "schedulefree", "ScheduleFreeWrapper",
            lambda m, lib=lib: _in_train_mode(
                lib.ScheduleFreeWrapper(torch.optim.SGD(trained(m), lr=0.1), momentum=0.9)
            ),
        )  # fmt: skip
        yield Case("schedulefree: saved in eval mode", "schedulefree", partial(_saved_in_eval_mode, lib))
    if (lib := module_of("mechanic_pytorch")) is not None:
        yield _case(
            "mechanic_pytorch", "mechanize(SGD)", lambda m, lib=lib: lib.mechanize(torch.optim.SGD)(trained(m), lr=1.0)
        )
        yield _case(
            "mechanic_pytorch",
            "mechanize(AdamW)",
            lambda m, lib=lib: lib.mechanize(torch.optim.AdamW)(trained(m), lr=1.0),
        )
    if (lib := module_of("opacus.optimizers")) is not None:
        yield Case("opacus: DPOptimizer", "opacus", partial(_private, lib), sharded=False)


def _case(library: str, name: str, make: Callable[[nn.Module], Any], **how: Any) -> Case:
    return Case(f"{library}: {name}", library, lambda lay: training.training(make, lay, **how))


def _split(lib: Any, model: nn.Module) -> Any:
    from zoo.optimizers_of_libraries import tall_and_flat

    tall, flat = tall_and_flat(model)
    return lib.SplitOpt(
        [{"params": tall, "optimizer": lib.Muon, "lr": 0.01}, {"params": flat, "optimizer": lib.AdamW, "lr": 0.01}]
    )


def _saved_in_eval_mode(lib: Any, lay: Lay) -> Run:
    """Between steps the optimizer is in eval mode, where the parameters are other numbers."""
    run = training.training(
        lambda m: lib.AdamWScheduleFree(trained(m), lr=0.01), lay, models=(training.Odd,), drive=_step_between_modes
    )
    run.state["optimizer"].eval()
    return run


def _step_between_modes(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    optimizer.train()
    loss = training.usual(model, optimizer, number)
    optimizer.eval()
    return loss


def _private(lib: Any, lay: Lay) -> Run:
    from opacus import GradSampleModule

    model = GradSampleModule(training.Common())
    optimizer = lib.DPOptimizer(
        torch.optim.Adam(trained(model), lr=0.01), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip

    def step(number: int) -> Any:
        optimizer.generator.manual_seed(number)
        optimizer.zero_grad()
        loss = training.loss_of(model, number)
        loss.backward()
        optimizer.step()
        return [loss.detach(), [p.detach().clone() for p in model.parameters()]]

    return Run({"model": model, "optimizer": optimizer}, step)
