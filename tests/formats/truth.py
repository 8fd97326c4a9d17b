"""What each golden checkpoint of a peer holds, as the peer had it in memory, and the comparison with what we read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.ondisk import names
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from tests.formats.expected import SUMS, Expected, read_sums

GOLDEN = LocalPlace(__file__).parent.parent / "golden"
BUFFERS = ("pos_scale", "seen")

NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


class Truth:
    """One golden checkpoint with its truth (tests/golden/FIXTURES.md describes both)."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, GOLDEN / name
        self.facts: dict[str, Any] = json.loads((self.folder / "expected.json").read_text())

    @property
    def path(self) -> Path:
        return self.folder / "ckpt"

    @cached_property
    def tensors(self) -> dict[str, Expected]:
        return read_sums(self.folder / SUMS)

    @property
    def ids(self) -> dict[str, int]:
        """torch's integer id of each parameter."""
        params = [p for group in self.facts.get("param_groups") or () for p in group.get("params", ())]
        return {fqn: i for i, fqn in enumerate(params)}

    def section(self, prefix: str) -> dict[str, Expected]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    @property
    def model(self) -> dict[str, Expected]:
        model = self.section("model.")
        if self.facts["system"].startswith("Megatron"):
            # Of buffers, which have no fp32 master, Megatron keeps only what the module holds.
            model.update({k: v for k, v in self.section("module_bf16.").items() if k in BUFFERS})
        return model

    @property
    def optimizer(self) -> dict[tuple[str, str], Expected]:
        """(fqn, key) to the tensor."""
        return {(k.rpartition(".")[0], k.rpartition(".")[2]): v for k, v in self.section("optim.").items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    a, b = a.contiguous(), b.contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def check(name: str, path: Place | None = None) -> holdfast.Checkpoint:
    """Open a golden checkpoint and compare it with all of its truth; returns it for more."""
    truth = Truth(name)
    checkpoint = holdfast.open(truth.path if path is None else path)
    state = checkpoint.state_dict()
    model = state.get("model", {})
    # A file may leave out the second name of tied weights, as transformers' do; then the first one stands for both.
    second = {name for group in truth.facts.get("tied") or () if group[0] in model for name in group[1:]} - model.keys()
    wrong = faults(truth, {fqn: tensor for fqn, tensor in truth.model.items() if fqn not in second}, model)
    extra = sorted(model.keys() - truth.model.keys())
    assert not wrong and not extra, (wrong, extra)
    _check_optimizer(truth, state.get("optimizer", {}))
    wrong = faults(truth, truth.section("module_bf16."), state.get("module", {}))
    assert not wrong, wrong
    for prefix in ("views.", "progress."):
        for key, tensor in truth.section(prefix).items():
            of_that_name = [v for k, v in leaves(state) if k.rpartition("/")[2] == key and isinstance(v, torch.Tensor)]
            reasons = [tensor.fault(v) for v in of_that_name]
            assert "" in reasons, (prefix, key, reasons)
    _check_objects(truth, checkpoint, state)
    return checkpoint


def faults(truth: Truth, tensors: Mapping[str, Expected], held: Any) -> list[str]:
    """Why each of these tensors is not held as the truth says it is."""
    held = held if isinstance(held, dict) else {}
    return [why for key, tensor in tensors.items() if (why := tensor.fault(held.get(key), truth.tensors))]


def _check_optimizer(truth: Truth, held: dict[str, Any]) -> None:
    state, ids = held.get("state", {}), truth.ids
    by_id = bool(state) and all(type(key) is int for key in state)
    wrong = []
    for (fqn, key), tensor in truth.optimizer.items():
        leaf = state.get(ids[fqn] if by_id else fqn, {}).get(key)
        if why := tensor.fault(leaf, truth.tensors):
            wrong.append(why)
    assert not wrong, wrong
    told = {(ids[fqn] if by_id else fqn, key) for fqn, key in truth.optimizer}
    extra = {(k, key) for k, leaf in state.items() for key in leaf} - told
    assert not extra, extra
    groups = truth.facts.get("param_groups")
    if groups and truth.optimizer:
        assert len(held["param_groups"]) == len(groups)
        for mine, theirs in zip(held["param_groups"], groups, strict=True):
            for key, value in theirs.items():
                if key == "params" and key not in mine:
                    continue  # not kept by the format
                want = [ids[p] for p in value] if key == "params" and by_id else value
                assert _plain(mine.get(key)) == want, (key, mine.get(key), want)


def _check_objects(truth: Truth, checkpoint: holdfast.Checkpoint, state: dict[str, Any]) -> None:
    everywhere = dict(leaves(state))
    for path in checkpoint.differing:
        everywhere.update(leaves(checkpoint.per_rank(path, 0), path))
    for key, value in leaves(truth.facts.get("objects") or {}):
        if value == "10 * rank":
            continue
        found = [v for k, v in everywhere.items() if f"/{k}".endswith(f"/{key}") or f"/{key}".endswith(f"/{k}")]
        assert any(_plain(v) == value for v in found), (key, value, found)
    rng = truth.facts.get("rng") or {}
    if "torch_cpu_sha256" in rng:
        sums = [_sha256(v) for v in everywhere.values() if isinstance(v, (torch.Tensor, bytes))]
        assert rng["torch_cpu_sha256"] in sums


def _sha256(value: torch.Tensor | bytes) -> str:
    if isinstance(value, torch.Tensor):
        value = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() < 10000 else b""
    return hashlib.sha256(value).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def leaves(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its keys joined by slashes."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{at}/{key}" if at else str(key))
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{at}/{i}" if at else str(i))
    else:
        yield at, tree


def module_of(truth: Truth) -> nn.Module:
    """A module with the parameters and buffers of the truth, all filled with 7."""
    root = nn.Module()
    tied = {name: group[0] for group in truth.facts.get("tied") or () for name in group[1:]}
    for fqn, tensor in sorted(truth.model.items(), key=lambda item: item[0] in tied):  # the tied ones last
        *path, last = fqn.split(".")
        at, sevens = root, torch.full(tensor.shape, 7, dtype=tensor.dtype)
        for key in path:
            if not hasattr(at, key):
                at.add_module(key, nn.Module())
            at = getattr(at, key)
        if last in BUFFERS:
            at.register_buffer(last, sevens)
        elif fqn in tied:
            at.register_parameter(last, root.get_parameter(tied[fqn]))
        else:
            frozen = fqn in (truth.facts.get("frozen") or ())
            at.register_parameter(last, nn.Parameter(sevens, requires_grad=not frozen))
    return root


def optimizer_of(truth: Truth, module: nn.Module) -> torch.optim.Optimizer:
    """An AdamW over the truth's groups, with other hyperparameters; it has not stepped."""
    known = dict(module.named_parameters(remove_duplicate=False))
    groups = [{"params": [known[names.split(p)[0]] for p in g["params"]]} for g in truth.facts["param_groups"]]
    return torch.optim.AdamW(groups, lr=0.5, amsgrad=any(k == "max_exp_avg_sq" for _, k in truth.optimizer))
