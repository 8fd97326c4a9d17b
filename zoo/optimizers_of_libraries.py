"""Optimizers of other libraries: every class that a library has, made as its documentation says.

`zoo.__main__` collects `cases`. A library that is not installed makes no cases; a class that is new makes one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo import training
from zoo.case import Case
from zoo.training import Matrices, named, trained

Make = Callable[[Any, nn.Module], Any]
"""From the class and a model to an optimizer."""

SLOW = {"lr": 0.01}
FREE = {"lr": 1.0}
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "torchao": ("torchao.optim", SLOW), "bitsandbytes": ("bitsandbytes.optim", SLOW),
    "pytorch_optimizer": ("pytorch_optimizer", SLOW), "schedulefree": ("schedulefree", SLOW),
    "prodigyopt": ("prodigyopt", FREE), "heavyball": ("heavyball", SLOW), "lion_pytorch": ("lion_pytorch", SLOW),
    "adam_mini": ("adam_mini", SLOW), "torch_optimizer": ("torch_optimizer", SLOW),
    "pytorch_ranger": ("pytorch_ranger", SLOW), "came_pytorch": ("came_pytorch", SLOW),
    "dadaptation": ("dadaptation", FREE), "madgrad": ("madgrad", SLOW), "adan_pytorch": ("adan_pytorch", SLOW),
    "galore_torch": ("galore_torch", SLOW), "apollo_torch": ("apollo_torch", SLOW),
    "adam_atan2_pytorch": ("adam_atan2_pytorch", SLOW), "adabelief_pytorch": ("adabelief_pytorch", SLOW),
    "muon": ("muon", SLOW), "optimi": ("optimi", SLOW),
    "torchastic": ("torchastic", SLOW), "kron_torch": ("kron_torch", SLOW), "sgd_sai": ("sgd_sai", SLOW),
    "grokadamw": ("grokadamw", SLOW), "lomo_optim": ("lomo_optim", SLOW),
    "transformers": ("transformers.optimization", {}), "fairscale": ("fairscale.optim", SLOW),
}  # fmt: skip
"""By the name that rows are given: the module, and the arguments of all of its optimizers."""

LEFT_OUT = {
    "torchao._AdamW", "heavyball.PSGDBase", "heavyball.SOAPBase", "pytorch_optimizer.LoRARite",
    # They need a GPU.
    "torchao.CPUOffloadOptimizer", "galore_torch.GaLoreAdamW8bit", "apollo_torch.GaLoreAdamW8bit",
    "apollo_torch.QAPOLLOAdamW", "kron_torch.DistributedKron", "kron_torch.DistributedOneSidedKron",
    "lomo_optim.AdaLomo",
    # They fail in every loop.
    "bitsandbytes.PytorchLARS", "pytorch_optimizer.BSAM", "bitsandbytes.AdEMAMix32bit",
    "bitsandbytes.PagedAdEMAMix32bit",
    # They are wrappers, in a catalogue of their own.
    *(f"pytorch_optimizer.{name}" for name in (
        "FriendlySAM", "GSAM", "LookSAM", "Lookahead", "OrthoGrad", "PCGrad", "SAM", "TRAC", "WSAM",
        "SafeFP16Optimizer", "ScheduleFreeWrapper", "Magma",
    )),
    "torch_optimizer.Lookahead", "heavyball.SAMWrapper", "heavyball.SplitOpt", "fairscale.AdaScale",
    "fairscale.AdaScaleWrapper",
}  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    "bitsandbytes.LARS": {"momentum": 0.9}, "bitsandbytes.LARS32bit": {"momentum": 0.9},
    "bitsandbytes.LARS8bit": {"momentum": 0.9}, "bitsandbytes.SGD": {"momentum": 0.9},
    "bitsandbytes.SGD32bit": {"momentum": 0.9}, "bitsandbytes.SGD8bit": {"momentum": 0.9},
    "pytorch_optimizer.Ranger21": {"num_iterations": 30},
    "galore_torch.GaLoreAdafactor": {"relative_step": False}, "apollo_torch.GaLoreAdafactor": {"relative_step": False},
    "torch_optimizer.Adafactor": {"relative_step": False},
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "prodigyopt.Prodigy with safeguards": {"safeguard_warmup": True, "use_bias_correction": True, "slice_p": 2},
    "transformers.Adafactor with an lr": {"lr": 0.01, "relative_step": False, "beta1": 0.9},
    "bitsandbytes.Adam8bit of everything": {"min_8bit_size": 1},
    "bitsandbytes.Lion8bit of everything": {"min_8bit_size": 1},
    "torchao.AdamW8bit in small blocks": {"block_size": 64},
    "torchao.Adam4bit in small blocks": {"block_size": 32},
    "torchao.AdamW8bit with stochastic rounding": {"bf16_stochastic_round": True},
    "pytorch_optimizer.AdamW in foreach": {"foreach": True},
    "optimi.AdamW in triton's absence": {"foreach": True},
    "optimi.AdamW with gradient release": {"gradient_release": False, "decouple_lr": True, "max_lr": 0.02},
    "schedulefree.AdamWScheduleFree with warm-up": {"warmup_steps": 5, "foreach": False},
    "lion_pytorch.Lion decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "madgrad.MADGRAD without momentum": {"momentum": 0.0},
    "dadaptation.DAdaptAdam decoupled": {"decouple": True, "weight_decay": 0.1},
    "heavyball.AdamW in bfloat16": {"storage_dtype": "bfloat16"},
    "heavyball.SOAP merging dimensions": {"merge_dims": True},
}
"""More ways to make some of them, by class and what the row says."""


def cases() -> Iterator[Case]:
    """All optimizers of all libraries that are here."""
    for library, (module, options) in LIBRARIES.items():
        package = module_of(module)
        for name in sorted(vars(package)) if package is not None else ():
            kind = getattr(package, name)
            if _is_own_optimizer(kind) and f"{library}.{name}" not in LEFT_OUT:
                yield _case(library, name, name, kind, options | MORE.get(f"{library}.{name}", {}))
        for title, more in VARIANTS.items():
            name = title.partition(" ")[0].partition(".")[2]
            if title.startswith(f"{library}.") and hasattr(package, name):
                given = {} if "lr" in more else options
                yield _case(library, title.partition(".")[2], name, getattr(package, name), given | more)


def module_of(name: str) -> Any:
    """The module, or None where its library is not installed."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def _is_own_optimizer(kind: Any) -> bool:
    return (
        isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and not kind.__module__.startswith("torch.")
    )


def _case(library: str, title: str, name: str, kind: Any, options: dict[str, Any]) -> Case:
    special = MAKES.get(f"{library}.{name}") or (MAKES.get(f"{library}.*"))
    how = HOW.get(f"{library}.{name}", HOW.get(f"{library}.*", {}))

    def make(model: nn.Module) -> Any:
        return special(kind, model) if special is not None else kind(trained(model), **options)

    return Case(f"{library}: {title}", library, lambda lay: training.training(make, lay, **how))


def in_train_mode(kind: Any, model: nn.Module) -> Any:
    """Those of schedulefree have modes, as modules have."""
    optimizer = kind(trained(model), lr=0.01)
    optimizer.train()
    return optimizer


def tall_and_flat(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What Muon is made for, and the rest."""
    inner = [p for n, p in named(model) if p.dim() == 2 and "embed" not in n and "head" not in n]
    known = {id(p) for p in inner}
    return inner, [p for p in trained(model) if id(p) not in known]


def with_muon_groups(kind: Any, model: nn.Module) -> Any:
    """For those that are told by a key of the group which parameters are matrices."""
    tall, flat = tall_and_flat(model)
    return kind([{"params": tall, "use_muon": True, "lr": 0.02}, {"params": flat, "use_muon": False, "lr": 0.01}])


def with_group_of_ranks(make: Make) -> Make:
    """For those that ask for a process group even where there is one rank."""

    def made(kind: Any, model: nn.Module) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return make(kind, model)

    return made


def _of_ranks(groups: Any = None) -> Make:
    return with_group_of_ranks(lambda kind, model: kind(trained(model), lr=0.01))


def _low_rank(kind: Any, model: nn.Module) -> Any:
    tall, flat = tall_and_flat(model)
    low = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    if kind.__module__.startswith("pytorch_optimizer"):
        low |= {"projection_type": "random" if kind.__name__ == "APOLLO" else "std", "scale_type": "channel"}
    elif kind.__module__ == "apollo_torch.apollo":
        low |= {"proj": "random", "scale_type": "channel"}
    if "Adafactor" in kind.__name__:
        return kind([{"params": flat}, {"params": tall, **low}], lr=0.01, relative_step=False)
    return kind([{"params": flat}, {"params": tall, **low}], lr=0.01)


MAKES: dict[str, Make] = {
    **{f"pytorch_optimizer.{name}": with_muon_groups for name in ("AdaGO", "AdaMuon", "Muon", "NorMuon")},
    "pytorch_optimizer.DistributedMuon": with_group_of_ranks(with_muon_groups),
    "pytorch_optimizer.MuonClip": lambda kind, m: kind(
        [{"params": tall_and_flat(m)[0], "use_muon": True}, {"params": tall_and_flat(m)[1], "use_muon": False}]
    ),
    "pytorch_optimizer.AdaLOMO": lambda kind, m: kind(m, lr=0.01),
    "pytorch_optimizer.LOMO": lambda kind, m: kind(m, lr=0.01),
    "pytorch_optimizer.AdamMini": lambda kind, m: kind(m, lr=0.01, num_embeds=64, num_heads=4),
    "pytorch_optimizer.AliG": lambda kind, m: kind(trained(m), max_lr=0.1, momentum=0.9),
    "pytorch_optimizer.DeMo": _of_ranks(),
    **{f"pytorch_optimizer.{name}": _low_rank for name in ("APOLLO", "GaLore", "Fira", "Alice", "Conda")},
    "apollo_torch.APOLLOAdamW": _low_rank, "galore_torch.GaLoreAdamW": _low_rank,
    "galore_torch.GaLoreAdafactor": _low_rank,
    "heavyball.SFAdamW": lambda kind, m: kind(trained(m), lr=0.01),
    "adam_mini.Adam_mini": lambda kind, m: kind(named(m), lr=0.01, dim=64, n_heads=4, verbose=False),
    "adam_atan2_pytorch.MuonAdamAtan2": lambda kind, m: kind(*tall_and_flat(m), lr=0.01),
    "adam_atan2_pytorch.PolarAdamAtan2": lambda kind, m: kind(*tall_and_flat(m), lr=0.01),
    "muon.Muon": with_group_of_ranks(lambda kind, m: kind(trained(m), lr=0.01)),
    "muon.MuonWithAuxAdam": with_group_of_ranks(with_muon_groups),
    "muon.SingleDeviceMuonWithAuxAdam": with_muon_groups,
    "lomo_optim.Lomo": with_group_of_ranks(lambda kind, m: kind(m, lr=0.01)),
    **{f"schedulefree.{name}ScheduleFree{more}": in_train_mode
       for name in ("AdamW", "RAdam", "SGD") for more in ("", "Paper", "Reference")},
    "fairscale.OSS": with_group_of_ranks(lambda kind, m: kind(trained(m), torch.optim.AdamW, lr=0.01)),
    "grokadamw.GrokAdamW": lambda kind, m: kind(trained(m), lr=0.01, grokking_signal_fns=None),
}  # fmt: skip
"""Those that are not made from parameters and a learning rate."""

HOW: dict[str, dict[str, Any]] = {
    **{f"pytorch_optimizer.{name}": {"drive": training.with_fused_backward} for name in ("AdaLOMO", "LOMO")},
    "lomo_optim.Lomo": {"drive": training.with_fused_backward, "models": (training.Common,)},
    "pytorch_optimizer.AliG": {"drive": training.with_loss},
    **{
        f"schedulefree.{name}ScheduleFreeClosure": {"drive": training.with_closure}
        for name in ("AdamW", "RAdam", "SGD")
    },
    "torchastic.*": {"dtype": torch.bfloat16},
    "torchao.AdamW8bit with stochastic rounding": {"dtype": torch.bfloat16},
    "muon.Muon": {"models": (Matrices,)},
    "fairscale.OSS": {"drive": training.then_consolidated, "models": (training.Common,)},
}
"""Those that want another loop, model or dtype."""
