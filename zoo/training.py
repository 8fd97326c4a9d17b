"""The small models and the loops that the optimizers of the zoo train.

Called by the catalogues. A model has what breaks rules: odd sizes, a frozen parameter, one that never gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zoo.case import Lay, Run

WIDTH, WORDS, CLASSES = 64, 12, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Embedding, convolution, odd sizes, a frozen parameter and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.conv = nn.Conv1d(WIDTH, 5, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x * self.gain + self.frozen)


class Common(nn.Module):
    """What every optimizer is written for: all parameters get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Matrices(nn.Module):
    """Nothing but matrices, for optimizers that know nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WORDS, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, 128, bias=False)
        self.head = nn.Linear(128, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, WORDS).to(self.first.weight.dtype)
        return self.head(torch.tanh(self.second(self.first(x))))


MODELS: tuple[type[nn.Module], ...] = (Odd, Common, Matrices)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The loss of batch ``number``; every rank has the same batch."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, WORDS, (4, 6), generator=generator)
    wanted = torch.randint(0, CLASSES, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), wanted.flatten())


Drive = Callable[[nn.Module, Any, int], torch.Tensor]
"""One step of training: model, optimizer, number."""


def each(optimizer: Any) -> list[Any]:
    """An optimizer, or all in a list or a dict of them."""
    if isinstance(optimizer, dict):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def usual(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """Backward, step."""
    loss = loss_of(model, number)
    loss.backward()
    for one in each(optimizer):
        one.step()
    model.zero_grad()
    return loss.detach()


def with_graph(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers that differentiate the gradient."""
    loss = loss_of(model, number)
    loss.backward(create_graph=True)
    for one in each(optimizer):
        one.step()
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach()


def with_closure(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers that evaluate the model themselves."""

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    with torch.enable_grad():
        closure()
        for one in each(optimizer):
            one.step(closure)
    model.zero_grad()
    return loss_of(model, number).detach()


def with_loss(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers that ask for the loss once more."""
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step(lambda: float(loss.detach()))
    model.zero_grad()
    return loss.detach()


def then_consolidated(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers whose state is gathered on request, before ``state_dict()`` gives it."""
    loss = usual(model, optimizer, number)
    optimizer.consolidate_state_dict(0)
    return loss


def in_two_steps(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers of the kind of SAM, that go up before they go down."""
    loss = loss_of(model, number)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    loss_of(model, number).backward()
    optimizer.second_step(zero_grad=True)
    return loss.detach()


def with_fused_backward(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    """For optimizers that step while the gradients are made."""
    loss = loss_of(model, number)
    optimizer.fused_backward(loss, 1e-3)
    return loss.detach()


def with_several(times: int) -> Drive:
    """Several backwards to a step of the optimizer, as for the accumulation of gradients."""

    def drive(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
        loss = loss_of(model, number)
        loss.backward()
        if number % times == times - 1:
            for one in each(optimizer):
                one.step()
            model.zero_grad()
        return loss.detach()

    return drive


def training(
    make: Callable[[nn.Module], Any], lay: Lay, *, models: Sequence[type[nn.Module]] = MODELS,
    drive: Drive | None = None, dtype: torch.dtype = torch.float32, more: Callable[[nn.Module, Any],
    dict[str, Any]] | None = None,
) -> Run:  # fmt: skip
    """A run of the first model that ``make``'s optimizer trains at all; ``more`` is what else is saved."""
    drives = (drive,) if drive is not None else (usual, with_closure, with_graph)
    if len(models) == 1 and len(drives) == 1:
        return _run(make, lay, models[0], drives[0], dtype, more)
    return _run(make, lay, *_first_that_works(make, models, drives, dtype), dtype, more)


_known: dict[int, tuple[type[nn.Module], Drive]] = {}


def _first_that_works(
    make: Callable[[nn.Module], Any], models: Sequence[type[nn.Module]], drives: Iterable[Drive], dtype: torch.dtype
) -> tuple[type[nn.Module], Drive]:
    key = id(make)
    if key not in _known:
        failure: Exception | None = None
        state = torch.random.get_rng_state()
        for kind in models:
            for drive in drives:
                try:
                    run = _run(make, lambda model: model, kind, drive, dtype, None)
                    run.step(0), run.step(1)
                except Exception as error:
                    failure = failure or error
                    continue
                _known[key] = kind, drive
                torch.random.set_rng_state(state)
                return _known[key]
        torch.random.set_rng_state(state)
        raise failure or RuntimeError("no model")
    return _known[key]


def _run(
    make: Callable[[nn.Module], Any], lay: Lay, kind: type[nn.Module], drive: Drive, dtype: torch.dtype,
    more: Callable[[nn.Module, Any], dict[str, Any]] | None,
) -> Run:  # fmt: skip
    model = lay(kind().to(dtype))
    optimizer = make(model)
    state = {"model": model, "optimizer": optimizer}
    if more is not None:
        state |= more(model, optimizer)
    return Run(state, lambda number: [drive(model, optimizer, number), _seen(model)])


def _seen(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or this rank's part of it."""
    return getattr(tensor, "_local_tensor", tensor)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The same with their names."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]
