"""Modules that torch alone is enough for: its own layers, and what people do with ``nn.Module``.

`zoo.__main__` collects `cases`; other catalogues use `case` and `training_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo.case import Case, Lay, Run

Inputs = Callable[[torch.Generator], tuple[Any, ...]]


def features(*shape: int) -> Inputs:
    return lambda generator: (torch.randn(*shape, generator=generator),)


def tokens(count: int, *shape: int) -> Inputs:
    return lambda generator: (torch.randint(0, count, shape, generator=generator),)


def training_of(
    make: Callable[[], nn.Module], inputs: Inputs, lay: Lay, *, lr: float = 0.05, sparse: bool = False,
    trains: bool = True, more: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> Run:  # fmt: skip
    """A run that trains a module by SGD on what it gives; or, if it has nothing to be trained, only calls it."""
    model = lay(make())
    wanted = [p for p in model.parameters() if p.requires_grad] if trains else []
    state: dict[str, Any] = {"model": model}
    kind = (
        (lambda p: torch.optim.SparseAdam(p, lr=lr)) if sparse else (lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))
    )
    optimizer = kind(wanted) if wanted else None
    if optimizer is not None:
        state["optimizer"] = optimizer
    if more is not None:
        state |= more(model)

    def step(number: int) -> Any:
        given = inputs(torch.Generator().manual_seed(number))
        if optimizer is None:
            with torch.no_grad():
                out = model(*given)
            return [_leaves(out), seen(model)]
        out = model(*given)
        loss = sum((leaf.abs().float() ** 2).mean() for leaf in _leaves(out) if leaf.requires_grad)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [[leaf.detach() for leaf in _leaves(out)], seen(model)]

    return Run(state, step)


def seen(model: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, persistent or not, as they are on this rank."""
    found = [*model.parameters(), *model.buffers()]
    found = [t for t in found if not isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer))]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in found if not t.is_meta]


def _leaves(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out.dequantize() if out.is_quantized else out]
    if isinstance(out, dict):
        return [leaf for value in out.values() for leaf in _leaves(value)]
    if isinstance(out, (list, tuple)):
        return [leaf for value in out for leaf in _leaves(value)]
    return []


def case(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Inputs,
    *,
    library: str = "torch",
    sharded: bool = True,
    **how: Any,
) -> Case:
    return Case(f"{library}: {name}", library, lambda lay: training_of(make, inputs, lay, **how), sharded=sharded)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _layers()
    yield from _shared()


def _layers() -> Iterator[Case]:
    rows = features(4, 6)
    images = features(4, 3, 8, 8)
    yield case("Linear", lambda: nn.Linear(6, 5), rows)
    yield case("Linear without bias, odd rows", lambda: nn.Linear(6, 7, bias=False), rows)
    yield case("Bilinear", lambda: nn.Bilinear(6, 6, 3), lambda g: (*rows(g), *rows(g)))
    yield case("PReLU", lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5)), rows)
    yield case("Conv2d and BatchNorm2d", lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)), images)
    yield case("Conv2d, channels last", lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), images)
    yield case("ConvTranspose2d, grouped", lambda: nn.ConvTranspose2d(3, 6, 3, groups=3), images)
    yield case("BatchNorm1d, cumulative", lambda: nn.BatchNorm1d(6, momentum=None), rows)
    yield case("BatchNorm1d without statistics", lambda: nn.BatchNorm1d(6, track_running_stats=False), rows)
    yield case("SyncBatchNorm in eval mode", lambda: nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6).eval()), rows)
    yield case(
        "InstanceNorm2d with statistics", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), images
    )
    yield case("GroupNorm and RMSNorm", lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.RMSNorm(6)), rows)
    yield case("RNN", lambda: nn.RNN(6, 5, nonlinearity="relu"), features(3, 4, 6))
    yield case(
        "LSTM of two layers with projections", lambda: nn.LSTM(6, 8, num_layers=2, proj_size=3), features(3, 4, 6)
    )
    yield case("GRU in both directions", lambda: nn.GRU(6, 5, bidirectional=True), features(3, 4, 6))
    yield case("LSTMCell", lambda: nn.LSTMCell(6, 5), rows)
    yield case("MultiheadAttention", lambda: nn.MultiheadAttention(8, 2), lambda g: (*features(3, 4, 8)(g),) * 3)
    yield case(
        "MultiheadAttention with other keys and biases", lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3,
        add_bias_kv=True),
        lambda g: (*features(3, 4, 8)(g), *features(3, 4, 5)(g), *features(3, 4, 3)(g)),
    )  # fmt: skip
    yield case(
        "TransformerEncoder with dropout",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        features(3, 4, 8),
    )  # fmt: skip
    yield case("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 16), lambda g: (*features(3, 4, 8)(g),) * 2)
    yield case("Embedding with padding", lambda: nn.Embedding(11, 6, padding_idx=0), tokens(11, 4, 3))
    yield case("Embedding with a greatest norm", lambda: nn.Embedding(11, 6, max_norm=1.0), tokens(11, 4, 3))
    yield case("EmbeddingBag", lambda: nn.EmbeddingBag(11, 6), tokens(11, 4, 3))
    yield case(
        "sparse Embedding and SparseAdam", lambda: nn.Embedding(11, 6, sparse=True), tokens(11, 4, 3), sparse=True
    )
    yield case(
        "sparse EmbeddingBag and SparseAdam", lambda: nn.EmbeddingBag(11, 6, sparse=True), tokens(11, 4, 3), sparse=True
    )
    yield case("ModuleDict with slashes and blanks in names", _odd_names, rows)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        yield case(
            f"Linear in {name}", lambda dtype=dtype: nn.Linear(6, 5).to(dtype), lambda g, d=dtype: (rows(g)[0].to(d),)
        )
    for name in ("LazyLinear", "LazyConv2d and LazyBatchNorm2d"):
        yield case(f"{name} after a pass", lambda name=name: _lazy(name, passed=True), images if "2d" in name else rows)
        yield case(
            f"{name} before the first pass",
            lambda name=name: _lazy(name, passed=False),
            images if "2d" in name else rows,
            trains=False,
            sharded=False,
        )


def _odd_names() -> nn.Module:
    names = ("a/b", "with blank", "%2F", "ünï", "0", "weight", "module", "_orig_mod")
    kind = type("OddNames", (nn.ModuleDict,), {"forward": lambda self, x: sum(layer(x) for layer in self.values())})
    return kind({name: nn.Linear(6, 2) for name in names})


def _lazy(name: str, *, passed: bool) -> nn.Module:
    if name == "LazyLinear":
        model, given = nn.Sequential(nn.LazyLinear(5)), torch.randn(4, 6)
    else:
        model, given = nn.Sequential(nn.LazyConv2d(5, 3), nn.LazyBatchNorm2d()), torch.randn(4, 3, 8, 8)
    if passed:
        model(given)
    return model


class Tied(nn.Module):
    """An embedding whose matrix is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


class Twice(nn.Module):
    """One block under two names, and one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("also", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(torch.tanh(self.first(x))) * self.also.sum()


class Views(nn.Module):
    """Parameters that are views of one flat tensor, as some trainers lay them out."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(6 * 5 + 5)
        self.weight = nn.Parameter(flat[:30].view(5, 6))
        self.bias = nn.Parameter(flat[30:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Lists(nn.Module):
    """ParameterList, ParameterDict, ModuleList, and places for parameters and buffers that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.named = nn.ParameterDict({"a": torch.randn(6), "b": nn.Parameter(torch.randn(6), requires_grad=False)})
        self.layers = nn.ModuleList([nn.Linear(6, 6), None, nn.Linear(6, 6)])
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[0](x) * self.several[0] + self.several[1]) * self.named["a"] + self.named["b"]


def _shared() -> Iterator[Case]:
    rows = features(4, 6)
    yield case("tied weights", Tied, tokens(11, 4, 3))
    yield case("a module and a buffer under two names", Twice, rows)
    yield case("parameters that are views of one tensor", Views, rows, sharded=False)
    yield case("lists and dicts of parameters, and none", Lists, rows)
    yield case(
        "a teacher that shares layers with the model", Tied, tokens(11, 4, 3), more=lambda m: {"teacher": m.embed}
    )
    yield case("parameters with other strides", _transposed, rows)
    yield Case("torch: a dict of tensors that is called", "torch", _functional, sharded=False)
    yield Case("torch: a list of modules", "torch", _chunks, sharded=False)


def _transposed() -> nn.Module:
    model = nn.Linear(6, 5)
    model.weight = nn.Parameter(torch.randn(6, 5).t())
    return model


def _functional(lay: Lay) -> Run:
    base = nn.Linear(6, 5)
    params = {name: p.detach().clone() for name, p in base.named_parameters()}

    def step(number: int) -> Any:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        loss = lambda p: torch.func.functional_call(base, p, (x,)).square().mean()  # noqa: E731
        for name, gradient in torch.func.grad(loss)(params).items():
            params[name] -= 0.1 * gradient
        return [p.clone() for p in params.values()]

    return Run({"params": params}, step)


def _chunks(lay: Lay) -> Run:
    chunks = [nn.ModuleDict({"0": nn.Linear(6, 6)}), nn.ModuleDict({"1": nn.Linear(6, 5)})]
    optimizers = [torch.optim.Adam(chunk.parameters(), lr=0.1) for chunk in chunks]

    def step(number: int) -> Any:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        chunks[1]["1"](torch.tanh(chunks[0]["0"](x))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return [seen(chunk) for chunk in chunks]

    return Run({"model": chunks, "optimizer": optimizers}, step)
