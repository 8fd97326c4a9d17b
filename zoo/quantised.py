"""Quantised modules, and modules trained to be: torch's own, torchao's, bitsandbytes', hqq's and quanto's.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo.case import Case
from zoo.modules import case, features
from zoo.optimizers_of_libraries import module_of

ROWS = features(4, 64)


class Net(nn.Module):
    """Two layers that any quantiser takes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, dtype=dtype)
        self.second = nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to(self.second.bias.dtype)))).float()


class WithObservers(nn.Module):
    """Observers and fake quantisers, as quantisation-aware training has them."""

    def __init__(self) -> None:
        super().__init__()
        import torch.ao.quantization as quantization

        self.layer = nn.Linear(64, 8)
        self.fake = quantization.FakeQuantize(
            observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )
        self.channels = quantization.FakeQuantize(
            observer=quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
        )  # fmt: skip
        self.histogram = quantization.HistogramObserver(bins=16)
        self.extremes = quantization.MinMaxObserver()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.histogram(x.detach()), self.extremes(x.detach())
        return nn.functional.linear(self.fake(x), self.channels(self.layer.weight), self.layer.bias)


def cases() -> Iterator[Case]:
    """All of them."""
    yield case("fake quantisers and observers", WithObservers, ROWS)
    yield case("prepare_qat", _prepared, ROWS)
    yield case("converted from prepare_qat", _converted, ROWS, sharded=False, trains=False)
    yield case("quantize_dynamic", _dynamic, ROWS, sharded=False, trains=False)
    yield from _torchao()
    yield from _bitsandbytes()
    yield from _others()


def _prepared() -> nn.Module:
    import torch.ao.quantization as quantization

    model = quantization.QuantWrapper(Net()).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model)


def _converted() -> nn.Module:
    import torch.ao.quantization as quantization

    torch.backends.quantized.engine = "fbgemm"
    model = quantization.QuantWrapper(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))).eval()
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    prepared = quantization.prepare(model)
    prepared(torch.randn(8, 64))
    return quantization.convert(prepared)


def _dynamic() -> nn.Module:
    torch.backends.quantized.engine = "fbgemm"
    return torch.ao.quantization.quantize_dynamic(Net().eval(), {nn.Linear}, dtype=torch.qint8)


def _torchao() -> Iterator[Case]:
    quantization = module_of("torchao.quantization")
    if quantization is None:
        return

    def quantised(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = Net(dtype)
            quantization.quantize_(model, getattr(quantization, name)(**options))
            return model

        return make

    for name, dtype, options in (
        ("Int8WeightOnlyConfig", torch.float32, {}), ("Int8DynamicActivationInt8WeightConfig", torch.float32, {}),
        ("IntxWeightOnlyConfig", torch.float32, {}), ("Float8WeightOnlyConfig", torch.bfloat16, {}),
        ("Int8DynamicActivationIntxWeightConfig", torch.float32, {}),
    ):  # fmt: skip
        if hasattr(quantization, name):
            yield case(name, quantised(name, dtype, **options), ROWS, library="torchao", trains=False)
            yield case(f"{name}, its biases trained", quantised(name, dtype, **options), ROWS, library="torchao")
    qat = module_of("torchao.quantization.qat")
    if hasattr(qat, "QATConfig"):
        yield case("QATConfig", lambda: _qat(quantization, qat), ROWS, library="torchao")
    if hasattr(qat, "FakeQuantizedLinear"):
        fake = lambda: nn.Sequential(qat.FakeQuantizedLinear(  # noqa: E731
            64, 8, weight_config=qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)))  # fmt: skip
        yield case("FakeQuantizedLinear", fake, ROWS, library="torchao")
    if module_of("torchao.float8") is not None:
        yield case("float8 training", _float8, ROWS, library="torchao")
    if module_of("torchao.prototype.quantized_training") is not None:
        yield case("int8 mixed precision training", _int8_training, ROWS, library="torchao")
    yield case(
        "LoRA beside quantised weights", lambda: _Lora(quantised("Int8WeightOnlyConfig")), ROWS, library="torchao"
    )


def _qat(quantization: Any, qat: Any) -> nn.Module:
    model = Net()
    base = quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=_by_groups())
    quantization.quantize_(model, qat.QATConfig(base, step="prepare"))
    return model


def _by_groups() -> Any:
    from torchao.quantization.granularity import PerGroup

    return PerGroup(32)


def _float8() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(Net(torch.bfloat16), config=Float8LinearConfig(emulate=True))


def _int8_training() -> nn.Module:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = Net()
    quantize_(model, int8_weight_only_quantized_training())
    return model


class _Lora(nn.Module):
    def __init__(self, base: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.base = base().requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _bitsandbytes() -> Iterator[Case]:
    bnb = module_of("bitsandbytes")
    if bnb is None:
        return

    def moved(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(make(), nn.Linear(64, 4)).to("cpu")

    linear = bnb.nn.Linear4bit
    yield case(
        "Linear4bit nf4",
        moved(lambda: linear(64, 64, quant_type="nf4", compute_dtype=torch.float32)),
        ROWS,
        library="bitsandbytes",
    )
    yield case(
        "Linear4bit fp4, quantised twice",
        moved(lambda: linear(64, 64, quant_type="fp4", compress_statistics=True, compute_dtype=torch.float32)),
        ROWS,
        library="bitsandbytes",
    )
    yield case(
        "Linear8bitLt", moved(lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)), ROWS, library="bitsandbytes"
    )
    yield case(
        "Linear8bitLt with 16-bit weights", moved(lambda: bnb.nn.Linear8bitLt(64, 64)), ROWS, library="bitsandbytes"
    )
    yield case(
        "StableEmbedding",
        lambda: bnb.nn.StableEmbedding(16, 64),
        lambda g: (torch.randint(0, 16, (4,), generator=g),),
        library="bitsandbytes",
    )


def _others() -> Iterator[Case]:
    if (hqq := module_of("hqq.core.quantize")) is not None:

        def make_hqq() -> nn.Module:
            config = hqq.BaseQuantizeConfig(nbits=4, group_size=32)
            return nn.Sequential(
                hqq.HQQLinear(nn.Linear(64, 64), config, compute_dtype=torch.float32, device="cpu"), nn.Linear(64, 4)
            )

        yield case("HQQLinear", make_hqq, ROWS, library="hqq", sharded=False)
    if (quanto := module_of("optimum.quanto")) is not None:
        for weights in ("qint8", "qfloat8"):

            def make_quanto(weights: str = weights, *, frozen: bool = True) -> nn.Module:
                model = Net()
                quanto.quantize(model, weights=getattr(quanto, weights))
                quanto.freeze(model) if frozen else None
                return model

            yield case(f"{weights}, frozen", make_quanto, ROWS, library="quanto", sharded=False)
        yield case(
            "qint8 with activations, not frozen", lambda: _quanto_trained(quanto), ROWS, library="quanto", sharded=False
        )


def _quanto_trained(quanto: Any) -> nn.Module:
    model = Net()
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    return model
