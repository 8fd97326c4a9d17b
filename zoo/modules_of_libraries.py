"""Modules of other libraries: averages of weights, metrics, vector quantisers, Gaussian processes, graphs, diffusion.

`zoo.__main__` collects `cases`. A library that is not installed makes no cases.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.case import Case, Lay, Run
from zoo.modules import case, features, seen
from zoo.optimizers_of_libraries import module_of

ROWS = features(4, 6)


def cases() -> Iterator[Case]:
    """All of them."""
    for module, of_library in _LIBRARIES.items():
        lib = _timm_averages() if module == "timm" else module_of(module)
        if lib is not None:
            yield from of_library(lib)


class Small(nn.Module):
    """A model to be averaged, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def averaged(make: Callable[[nn.Module], Any], update: Callable[[Any, nn.Module], Any]) -> Callable[[Lay], Run]:
    """A run whose model is averaged by what ``make`` gives; what the average says is part of what a step gives."""

    def build(lay: Lay) -> Run:
        model = lay(Small())
        average = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> Any:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().sum() + model.layer.weight.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said = update(average, model)
            return [loss.detach(), seen(model), said]

        return Run({"model": model, "optimizer": optimizer, "average": average}, step)

    return build


def _average_case(
    library: str, name: str, make: Callable[[nn.Module], Any], update: Callable[[Any, nn.Module], Any]
) -> Case:
    return Case(f"{library}: {name}", library, averaged(make, update), sharded=False)


def _ema_pytorch(lib: Any) -> Iterator[Case]:
    options = {"beta": 0.9, "update_after_step": 2, "update_every": 1}
    updated = lambda ema, model: (ema.update(), seen(ema.ema_model))[1]  # noqa: E731
    every = lambda ema, model: (ema.update(), [seen(e.ema_model) for e in ema.ema_models])[1]  # noqa: E731
    yield _average_case("ema_pytorch", "EMA", lambda m: lib.EMA(m, **options), updated)
    yield _average_case(
        "ema_pytorch", "EMA without the model", lambda m: lib.EMA(m, include_online_model=False, **options), updated
    )
    yield _average_case("ema_pytorch", "KarrasEMA", lambda m: lib.KarrasEMA(m, sigma_rel=0.05, update_every=1), updated)
    yield _average_case("ema_pytorch", "PostHocEMA", _post_hoc(lib), every)


def _torch_ema(lib: Any) -> Iterator[Case]:
    make = lambda model: lib.ExponentialMovingAverage(model.parameters(), decay=0.9)  # noqa: E731
    shadows = lambda ema: [p.clone() for p in ema.shadow_params]  # noqa: E731
    yield _average_case(
        "torch_ema", "ExponentialMovingAverage", make, lambda ema, model: (ema.update(), shadows(ema))[1]
    )
    yield _average_case(
        "torch_ema", "ExponentialMovingAverage with stored weights", make,
        lambda ema, model: (ema.update(), ema.store(), shadows(ema))[2],
    )  # fmt: skip


def _timm(lib: Any) -> Iterator[Case]:
    updated = lambda ema, model: (ema.update(model), seen(ema.module))[1]  # noqa: E731
    for name in ("ModelEmaV2", "ModelEmaV3"):
        yield _average_case("timm", name, lambda m, name=name: getattr(lib, name)(m, decay=0.9), updated)


def _diffusers_average(lib: Any) -> Iterator[Case]:
    yield _average_case(
        "diffusers", "EMAModel", lambda m: lib.EMAModel(m.parameters(), decay=0.9, use_ema_warmup=True),
        lambda ema, model: (ema.step(model.parameters()), [p.clone() for p in ema.shadow_params])[1],
    )  # fmt: skip


def _post_hoc(lib: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        import tempfile

        return lib.PostHocEMA(
            model,
            sigma_rels=(0.05, 0.28),
            update_every=1,
            checkpoint_every_num_steps="manual",
            checkpoint_folder=tempfile.mkdtemp(prefix="zoo-ema-"),
        )

    return make


def _timm_averages() -> Any:
    """timm's averages, without the rest of timm, which needs torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = f"{spec.submodule_search_locations[0]}/utils/model_ema.py"
    found = importlib.util.spec_from_file_location("zoo_timm_model_ema", path)
    if found is None or found.loader is None:
        return None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def _metric(
    make: Callable[[], Any], give: Callable[[torch.Generator], tuple[Any, ...]], *, persistent: bool
) -> Callable[[Lay], Run]:
    def build(lay: Lay) -> Run:
        metric = make()
        metric.persistent(persistent)

        def step(number: int) -> Any:
            metric.update(*give(torch.Generator().manual_seed(number)))
            out = metric.compute()
            return {k: v.clone() for k, v in out.items()} if isinstance(out, dict) else torch.as_tensor(out).clone()

        return Run({"metric": metric}, step)

    return build


def _labels(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(8, 3, generator=g).softmax(1), torch.randint(0, 3, (8,), generator=g)


def _metrics(lib: Any) -> Iterator[Case]:
    classes = {"task": "multiclass", "num_classes": 3}
    pairs = lambda g: (torch.randn(8, generator=g), torch.randn(8, generator=g))  # noqa: E731
    kinds: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], tuple[Any, ...]]]] = {
        "Accuracy": (lambda: lib.Accuracy(**classes), _labels),
        "ConfusionMatrix": (lambda: lib.ConfusionMatrix(**classes), _labels),
        "AUROC, with lists of what it saw": (lambda: lib.AUROC(**classes), _labels),
        "AUROC, with thresholds": (lambda: lib.AUROC(**classes, thresholds=5), _labels),
        "MeanMetric": (lambda: lib.MeanMetric(), lambda g: (torch.randn(3, generator=g),)),
        "CatMetric": (lambda: lib.CatMetric(), lambda g: (torch.randn(3, generator=g),)),
        "PearsonCorrCoef": (lambda: lib.PearsonCorrCoef(), pairs),
        "MeanSquaredError": (lambda: lib.MeanSquaredError(), pairs),
        "RunningMean": (lambda: lib.RunningMean(window=3), lambda g: (torch.randn((), generator=g),)),
        "MetricCollection": (lambda: lib.MetricCollection([lib.Accuracy(**classes), lib.F1Score(**classes)]), _labels),
        "MinMaxMetric": (lambda: lib.MinMaxMetric(lib.Accuracy(**classes)), _labels),
        "MetricTracker": (lambda: _tracker(lib, classes), _labels),
    }  # fmt: skip
    for name, (make, give) in kinds.items():
        yield Case(f"torchmetrics: {name}", "torchmetrics", _metric(make, give, persistent=True), sharded=False)
    for name in ("Accuracy", "AUROC, with lists of what it saw"):
        make, give = kinds[name]
        yield Case(
            f"torchmetrics: {name}, not persistent",
            "torchmetrics",
            _metric(make, give, persistent=False),
            sharded=False,
        )


def _tracker(lib: Any, classes: dict[str, Any]) -> Any:
    tracker = lib.MetricTracker(lib.Accuracy(**classes))
    tracker.increment()
    tracker.persistent = lambda mode: [m.persistent(mode) for m in tracker]
    return tracker


def _vector_quantisers(lib: Any) -> Iterator[Case]:
    rows = features(2, 6, 8)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "VectorQuantize with an average": lambda: lib.VectorQuantize(dim=8, codebook_size=5, decay=0.8),
        "VectorQuantize made by k-means": lambda: lib.VectorQuantize(dim=8, codebook_size=5, kmeans_init=True,
        kmeans_iters=2),
        "VectorQuantize that is learnt": lambda: lib.VectorQuantize(dim=8, codebook_size=5, learnable_codebook=True,
        ema_update=False),
        "ResidualVQ": lambda: lib.ResidualVQ(dim=8, num_quantizers=2, codebook_size=5),
        "FSQ": lambda: lib.FSQ([3, 3], dim=8), "LFQ": lambda: lib.LFQ(codebook_size=8, dim=8),
        "SimVQ": lambda: lib.SimVQ(dim=8, codebook_size=5),
    }  # fmt: skip
    for name, make in kinds.items():
        wrapped = lambda make=make: nn.Sequential(nn.Linear(8, 8), make())  # noqa: E731
        yield case(name, wrapped, rows, library="vector_quantize_pytorch")


def _x_transformers(lib: Any) -> Iterator[Case]:
    make = lambda: lib.TransformerWrapper(  # noqa: E731
        num_tokens=16, max_seq_len=8, attn_layers=lib.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    )
    yield case(
        "TransformerWrapper", make, lambda g: (torch.randint(0, 16, (2, 6), generator=g),), library="x_transformers"
    )


def _gpytorch(lib: Any) -> Iterator[Case]:
    yield Case("gpytorch: ExactGP", "gpytorch", partial(_process, lib), sharded=False)


def _geometric(lib: Any) -> Iterator[Case]:
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    given = lambda g: (torch.randn(4, 6, generator=g), edges)  # noqa: E731
    for name, make in {
        "GCNConv": lambda: lib.GCNConv(6, 5), "GATConv": lambda: lib.GATConv(6, 5, heads=2),
        "GCNConv, lazy": lambda: lib.GCNConv(-1, 5), "SAGEConv": lambda: lib.SAGEConv(6, 5),
        "BatchNorm": lambda: _Graph(lib),
    }.items():  # fmt: skip
        yield case(name, make, given, library="torch_geometric", sharded="lazy" not in name, trains="lazy" not in name)


def _geotorch(lib: Any) -> Iterator[Case]:
    yield case("orthogonal", lambda: _constrained(lib.orthogonal), ROWS, library="geotorch")
    yield case("low_rank", lambda: _constrained(partial(lib.low_rank, rank=2)), ROWS, library="geotorch")


def _of_lycoris(lib: Any) -> Iterator[Case]:
    for algorithm in ("lora", "loha", "lokr", "dylora", "full"):
        yield Case(f"lycoris: {algorithm}", "lycoris", partial(_lycoris, lib, algorithm), sharded=False)


def _opacus(lib: Any) -> Iterator[Case]:
    layers = module_of("opacus.layers")
    yield case("GradSampleModule", lambda: lib.GradSampleModule(nn.Linear(6, 5)), ROWS, library="opacus", sharded=False)
    yield case("DPLSTM", lambda: layers.DPLSTM(6, 5, batch_first=True), features(2, 3, 6), library="opacus")
    yield case(
        "DPMultiheadAttention",
        lambda: layers.DPMultiheadAttention(8, 2),
        lambda g: (*features(3, 4, 8)(g),) * 3,
        library="opacus",
    )


def _diffusers(lib: Any) -> Iterator[Case]:
    try:
        _ = lib.UNet2DModel
    except Exception:  # it says that it is not to be had
        return
    unet = {
        "sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 8),
        "norm_num_groups": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4,
    }  # fmt: skip
    picture, small = features(1, 3, 8, 8), {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 8}
    yield case("UNet2DModel", lambda: _Sample(lib.UNet2DModel(**unet)), picture, library="diffusers")
    yield case("AutoencoderKL", lambda: lib.AutoencoderKL(**small), picture, library="diffusers")
    yield case("VQModel", lambda: lib.VQModel(**small, num_vq_embeddings=5), picture, library="diffusers")


class _Sample(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, 3).sample


class _Graph(nn.Module):
    def __init__(self, lib: Any) -> None:
        super().__init__()
        self.conv, self.norm = lib.GCNConv(6, 5), lib.BatchNorm(5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x, edges))


def _constrained(constrain: Callable[..., Any]) -> nn.Module:
    model = nn.Linear(6, 6)
    constrain(model, "weight")
    return model


def _process(lib: Any, lay: Lay) -> Run:
    given = torch.linspace(0, 1, 8)
    likelihood = lib.likelihoods.GaussianLikelihood(noise_prior=lib.priors.GammaPrior(1.1, 0.05))

    class Model(lib.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(given, torch.sin(given), likelihood)
            self.mean_module = lib.means.ConstantMean()
            self.covar_module = lib.kernels.ScaleKernel(
                lib.kernels.RBFKernel(lengthscale_prior=lib.priors.NormalPrior(0, 1))
            )

        def forward(self, x: torch.Tensor) -> Any:
            return lib.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = lib.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def step(number: int) -> Any:
        loss = -objective(model(given), torch.sin(given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), [p.detach().clone() for p in model.parameters()]]

    return Run({"model": model, "optimizer": optimizer}, step)


def _lycoris(lib: Any, algorithm: str, lay: Lay) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    lib.LycorisNetwork.apply_preset({"target_name": [".*"]})
    network = lib.create_lycoris(base, 1.0, linear_dim=4, linear_alpha=2.0, algo=algorithm)
    network.apply_to()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def step(number: int) -> Any:
        loss = base(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), seen(network)]

    return Run({"model": network, "optimizer": optimizer}, step)


_LIBRARIES: dict[str, Callable[[Any], Iterator[Case]]] = {
    "ema_pytorch": _ema_pytorch, "torch_ema": _torch_ema, "timm": _timm, "diffusers.training_utils": _diffusers_average,
    "torchmetrics": _metrics, "vector_quantize_pytorch": _vector_quantisers, "x_transformers": _x_transformers,
    "gpytorch": _gpytorch, "torch_geometric.nn": _geometric, "geotorch": _geotorch, "lycoris": _of_lycoris,
    "opacus": _opacus, "diffusers": _diffusers,
}  # fmt: skip
