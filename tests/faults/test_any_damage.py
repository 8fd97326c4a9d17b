"""Whatever happens to the files of a run: every command says what is wrong, in words, and none takes it for whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.doctor import checkpoints, mending
from holdfast.ondisk import blocks
from holdfast.repair.rescue import Rescued
from holdfast.run.orphans import collect
from holdfast.run.prune import prune
from tests.damaging import contents_of

STEPS = (1, 2, 3)

EDITS = (
    ('"model/w"', '"model/v"'), ("[12,50]", "[12,51]"), ('"float32"', '"float64"'), ('"0"', '"9"'),
    ('"step":', '"stop":'), ('"version":1', '"version":2'), ('"holdfast"', '"other"'), ("null", "7"),
)  # fmt: skip
"""What another program, or a careless hand, may make of a manifest; with a digest that is right again."""


def _state(step: int) -> dict[str, Any]:
    shared = torch.full((3, 3), float(step))
    return {
        "model": {"w": torch.arange(600.0).view(12, 50) + step, "half": torch.ones(7).bfloat16(), "tied": shared,
                  "too": shared, "none": torch.zeros(0, 4)},
        "optimizer": {"state": [{"m": torch.full((4,), float(step))}], "lr": 0.5},
        "bias": torch.arange(3) + step, "step": step, "frozen": {"z": torch.arange(2000.0)},
        "rng": holdfast.PerRank({"k": [step], "t": torch.arange(4)}),
    }  # fmt: skip


def _edited(text: str, chance: random.Random) -> str:
    text = text.replace(*chance.choice(EDITS))
    cut = text.rindex(',"digest"')
    return f'{text[:cut]},"digest":"{blocks.digest(text[:cut].encode())}"}}'


def _hurt(root: Path, chance: random.Random) -> str:
    """Damage one file; what was done."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path, other = chance.choice(files), chance.choice(files)
    data = path.read_bytes()
    at = chance.randrange(min(len(data), chance.choice((16, 400, 4200, len(data)))) or 1)
    kind = chance.choice(
        ("cut", "delete", "alter", "swap", "empty", "noise", "grow", "zeros", "folder", "link", "edit", "rename")
    )
    if kind == "edit" and path.name == "manifest.json":
        path.write_text(_edited(data.decode(), chance))
    elif kind in ("alter", "edit"):
        path.write_bytes(data[:at] + bytes([data[at] ^ chance.choice((1, 2, 16, 128))]) + data[at + 1 :])
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "rename":
        path.rename(path.with_name(chance.choice(("x", "manifest.json", f"{path.name}.tmp"))))
    elif kind in ("delete", "folder", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(chance.choice(("/nowhere", "/dev/zero", "/etc/passwd", "..")))
    else:
        made = {"cut": data[:at], "empty": b"", "noise": chance.randbytes(len(data)), "grow": data + b"more"}
        path.write_bytes(made.get(kind, data[:at] + bytes(len(data) - at)))
    return f"{kind} {path.relative_to(root)}"


def _tried(do: Callable[[], Any]) -> Any:
    """What it answers, or the error with which it refuses; any other error ends the test."""
    try:
        return do()
    except holdfast.HoldfastError as error:
        assert str(error)
        return error


def _check(root: Path, truth: dict[int, dict[str, torch.Tensor]], chance: random.Random) -> None:
    for step in STEPS:
        at = root / f"step-{step}"
        found = _tried(lambda at=at: checkpoints.diagnose(at))
        verified = _tried(lambda at=at: holdfast.open(at).verify(raises=False))
        if isinstance(found, list):
            assert all(one.mend for one in found if one.verdict == "fail"), found
            well = any(one.verdict == "ok" for one in found) and all(one.verdict != "fail" for one in found)
            assert not well or hasattr(verified, "whole"), (found, verified)
            assert well or not getattr(verified, "whole", False), (found, verified)
        _same(at, verified, truth[step])
        mending.mending(str(at)), checkpoints.advice(str(at)), mending.not_by_headers(str(at))
        _tried(lambda at=at: holdfast.tools.repair(at, sources=[root], dry_run=True))
    _tried(lambda: checkpoints.diagnose(root))
    _tried(lambda: collect(root))
    _tried(lambda: prune(root, holdfast.Keep(last=1)))
    for step in STEPS[1:]:
        at = root / f"step-{step}"
        if chance.random() < 0.5 and (at / "manifest.json").is_file():
            (at / "manifest.json").unlink()
        like = chance.choice([None, root / "step-1"])
        rescued = _tried(lambda at=at, like=like: holdfast.tools.rescue(at, like=like))
        if isinstance(rescued, Rescued) and not rescued.damages:
            verified = holdfast.open(at).verify(raises=False)
            assert verified.whole
            _same(at, verified, truth[step])
        repaired = _tried(lambda at=at: holdfast.tools.repair(at, sources=[root]))
        _same(at, repaired, truth[step])
    _tried(lambda: collect(root, dry_run=False))


def _same(at: Path, told: Any, truth: dict[str, torch.Tensor]) -> None:
    """What is told to be whole is read, and of the save that it says it is."""
    if getattr(told, "whole", False):
        opened = holdfast.open(at)
        for name in opened.tensors:
            # Nobody knows of a name or a type that was altered in a header, once the manifest is gone: docs/repair.md.
            if name in truth and opened.tensors[name].dtype == truth[name].dtype:
                assert torch.equal(opened.read(name), truth[name]), name


def _run(rounds: int, seed: int, root: Path) -> None:
    base = None
    for step in STEPS:
        base = holdfast.save(
            _state(step), root / f"step-{step}", step=step, base=base if step == 2 else None, files={"config": b"deep"}
        )
    opened = {step: holdfast.open(root / f"step-{step}") for step in STEPS}
    truth = {step: {name: one.read(name) for name in one.tensors} for step, one in opened.items()}
    good = contents_of(root)
    for number in range(rounds):
        chance = random.Random(seed + number)
        shutil.rmtree(root)
        for name, data in good.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        done = [_hurt(root, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        try:
            _check(root, truth, chance)
        except Exception as error:
            raise AssertionError(f"seed {seed + number}: {done}") from error


def test_any_damage(tmp_path: Path) -> None:
    _run(4, 0, tmp_path / "run")


@pytest.mark.slow
def test_much_damage(tmp_path: Path) -> None:
    _run(400, 1000, tmp_path / "run")
