"""A state of very many small tensors: holdfast beside safetensors, which does nothing but write them to one file.

Run as `python -m benchmarks.many [--quick]`; prints a table and the ratios, and writes JSON. The systems take turns on
the same tensors, and everything that is loaded is compared. Never compares figures of two runs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import safetensors.torch
import torch
from torch import nn

import holdfast
from benchmarks.bar import Bar
from benchmarks.cache import make_warm
from benchmarks.frame import folder, machine, options_of, write
from benchmarks.repeated import Repeated

FULL, QUICK = 1_000_000, 50_000
FOREIGN, PARAMETERS = 100_000, 20_000
"""Tensors of the file that is not ours, and parameters of the model with Adam; a tenth of it in small."""

WANTED = 4.0
THEIR_SAVE, THEIR_LOAD = "safetensors save_file", "safetensors load_file"


@dataclass
class Row(Repeated):
    """What one way took: seconds by the clock, and of the processor in all threads."""

    what: str
    tensors: int
    beside: str | None


class Rows:
    """All of one run, in the order in which they first came."""

    def __init__(self) -> None:
        self.found: dict[str, Row] = {}

    def spend(self, what: str, tensors: int, action: Callable[[], Any], beside: str | None = None) -> Any:
        """Do ``action`` and note what it took; its result."""
        began, cpu = time.monotonic(), time.process_time()
        result = action()
        row = self.found.setdefault(what, Row(what, tensors, beside))
        row.seconds.append(time.monotonic() - began)
        row.cpu.append(time.process_time() - cpu)
        print(f"{what}: {row.seconds[-1]:.2f} s, {row.cpu[-1]:.2f} s of a processor", file=sys.stderr, flush=True)
        return result

    def ratio(self, row: Row) -> float | None:
        """To the row that it is set beside."""
        beside = self.found.get(row.beside or "")
        return median(row.seconds) / median(beside.seconds) if beside else None


def tensors(count: int) -> dict[str, torch.Tensor]:
    """Scales and biases of very many experts: 16 to 64 numbers each."""
    return {f"layers.{n // 512}.experts.{n // 4 % 128}.w{n % 4}": torch.randn(16 + n % 49) for n in range(count)}


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same in nested dicts."""
    root: dict[str, Any] = {}
    for name, tensor in flat.items():
        *above, last = name.split(".")
        at = root
        for key in above:
            at = at.setdefault(key, {})
        at[last] = tensor
    return root


def emptied(state: Any) -> Any:
    """A state like ``state`` with nothing in it."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    return torch.zeros_like(state)


def compare(a: Any, b: Any) -> None:
    """Raise unless two states are equal."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise ValueError("what was loaded has other names")
        for key, value in a.items():
            compare(value, b[key])
    elif not torch.equal(a, b):
        raise ValueError("what was loaded differs from what was saved")


def turn(work: Path, flat: dict[str, torch.Tensor], rows: Rows) -> None:
    """Each way once."""
    count, file = len(flat), work / "all.safetensors"
    rows.spend(THEIR_SAVE, count, lambda: safetensors.torch.save_file(flat, file))
    make_warm(work)
    compare(flat, rows.spend(THEIR_LOAD, count, lambda: safetensors.torch.load_file(file)))
    file.unlink()
    for kind, state in (("flat", {"model": flat}), ("nested", {"model": nested(flat)})):
        path = work / kind
        rows.spend(f"save, {kind} dict", count, lambda s=state, p=path: holdfast.save(s, p), THEIR_SAVE)
        into = emptied(state)
        rows.spend(f"load, {kind} dict", count, lambda i=into, p=path: holdfast.load(p, i), THEIR_LOAD)
        compare(state, into)
        del into
        if kind == "flat":
            found = rows.spend("open + state_dict", count, lambda p=path: holdfast.open(p).state_dict(), THEIR_LOAD)
            compare(state, found)
            del found
        shutil.rmtree(path)
    with holdfast.Saver() as saver:
        for first in ("first", "second"):
            path = work / first
            saving = rows.spend(f"Saver.save, {first} call", count, lambda p=path: saver.save({"model": flat}, p))
            rows.spend(f"Saver.save, {first} wait", count, saving.wait)
            shutil.rmtree(path)


def others(work: Path, scale: int, rows: Rows) -> None:
    """A file that safetensors wrote, loaded in place; and a model with its optimizer."""
    flat = tensors(FOREIGN // scale)
    file = work / "theirs.safetensors"
    safetensors.torch.save_file(flat, file)
    their = f"{THEIR_LOAD}, {len(flat)}"
    rows.spend(their, len(flat), lambda: safetensors.torch.load_file(file))
    into = {"model": emptied(flat)}
    rows.spend("load of that file", len(flat), lambda: holdfast.load(file, into), their)
    compare({"model": flat}, into)
    model = nn.ParameterList(nn.Parameter(torch.randn(16 + n % 49)) for n in range(PARAMETERS // scale))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    count = 4 * len(model)
    rows.spend("save, model and Adam", count, lambda: holdfast.save(state, work / "adam"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rows.spend("load, model and Adam", count, lambda: holdfast.load(work / "adam", state))
    compare(dict(enumerate(before)), dict(enumerate(model.parameters())))


def bars_of(rows: Rows) -> list[Bar]:
    """What is wanted: one for each row that is set beside safetensors."""
    return [
        Bar(f"{row.what}, times as long as safetensors", ratio, most=WANTED)
        for row in rows.found.values()
        if (ratio := rows.ratio(row)) is not None
    ]


def show(rows: Rows) -> None:
    """Print the medians, and each ratio with the bar."""
    beside = f"of safetensors' time (wanted: at most {WANTED:g})"
    print(f"\n{'':34} {'tensors':>9} {'seconds':>8} {'processor':>10} {'a tensor':>9}  {beside}")
    for row in rows.found.values():
        each = median(row.seconds) / row.tensors * 1e6
        ratio = rows.ratio(row)
        verdict = "" if ratio is None else f"{ratio:.2f}  {'met' if ratio <= WANTED else 'MISSED'}"
        spent = f"{median(row.seconds):8.2f} {median(row.cpu):10.2f} {each:6.1f} us"
        print(f"{row.what:34} {row.tensors:9} {spent}  {verdict}")


def main() -> int:
    """The command."""
    small = f"{QUICK:,} tensors in place of {FULL:,}, three turns"
    options = options_of("many", __doc__, quick=small).parse_args()
    count, turns, scale = (QUICK, 3, 10) if options.quick else (FULL, 1, 1)
    rows = Rows()
    with folder(options.dir, "many") as work:
        flat = tensors(count)
        safetensors.torch.load(safetensors.torch.save({"warm": torch.zeros(1)}))  # nobody's first call counts
        for _ in range(turns):
            turn(work, flat, rows)
        others(work, scale, rows)
    show(rows)
    facts = {"tensors": count, "turns": turns, **machine()}
    write(options.out, facts, [vars(row) for row in rows.found.values()], bars_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
