"""``holdfast diff``: what differs between two checkpoints of any formats.

`commands` calls it. It changes nothing. Its exit code is 0 if they are the same, else 1, as that of `diff`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import typer

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.cli import output
from holdfast.cli.errors import Code
from holdfast.cli.remaps import map_of
from holdfast.cli.show import brief, typed
from holdfast.inspect.compare import Difference, compare, compare_names

_ORDER = ("only in a", "only in b", "shape", "dtype", "changed")


def diff(*, a: str, b: str, tensors: str, names_only: bool, top: int, remap: str | None, json: bool) -> None:
    left, right = holdfast.open(a, remap=map_of(remap)), holdfast.open(b)
    every = list(compare_names(left, right, only=tensors) if names_only else compare(left, right, only=tensors))
    differences = sorted((d for d in every if d.status != "same"), key=_by_size)
    counts = Counter[str](d.status for d in every)
    of_checksums = sum(d.by_checksums for d in every)
    of_tensors, of_values = _lines(left, right, differences)
    shown = of_tensors[: top or None], of_values[: top or None]
    if json:
        rows = [output.fields(d, "relative") for lines in shown for line in lines for d in line]
        same = counts["same"]
        same_by = {"names": same} if names_only else {"bytes": same - of_checksums, "checksums": of_checksums}
        output.as_json(
            {"a": a, "b": b, "same": not differences, "same_by": same_by, "counts": counts, "differences": rows}
        )
    else:
        _show(left, right, *shown)
        more = len(differences) - sum(len(line) for lines in shown for line in lines)
        if more:
            output.say(f"… and {more} more (--top 0 shows all)")
        output.say(_summary(counts, of_checksums, names_only=names_only))
    raise typer.Exit(Code.DIFFERENT if differences else Code.FINE)


def _by_size(difference: Difference) -> tuple[int, float, list[tuple[int, str]]]:
    """Names first, then the largest changes; a change without finite values counts as the largest."""
    relative = -float("inf") if difference.relative is None else -difference.relative
    return _ORDER.index(difference.status), relative, _natural(difference.name)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value: 2 before 10."""
    parts = re.split(r"0*([0-9]+)", name)  # every other one is a number
    return [(len(part) if at % 2 else 0, part) for at, part in enumerate(parts)]


def _lines(a: Checkpoint, b: Checkpoint, differences: list[Difference]) -> tuple[list[list[Difference]], ...]:
    """The differences of each line, of tensors and of values; items of a list that one lacks share a line."""
    of_tensors: list[list[Difference]] = []
    of_values: dict[tuple[str, str], list[Difference]] = {}
    for d in differences:
        parent, _, last = d.name.rpartition("/")
        if d.name in a.records or d.name in b.records:
            of_tensors.append([d])
        else:
            is_item = d.status in ("only in a", "only in b") and last.isdigit()
            of_values.setdefault((d.status, f"{parent}/" if is_item else d.name), []).append(d)
    return of_tensors, list(of_values.values())


def _summary(counts: Counter[str], of_checksums: int, *, names_only: bool) -> str:
    """What was found. Recorded checksums say what was saved: of the bytes on disk now nothing is claimed by them."""
    if set(counts) == {"same"}:
        if of_checksums:
            return f"the same by their recorded checksums: {counts['same']} names {_READS_BYTES}"
        what = "names, shapes and dtypes" if names_only else "to the last bit"
        return f"the same, {what}: {counts['same']} names"
    told = ", ".join(f"{counts[status]} {_WORDS[status]}" for status in (*_ORDER, "same") if counts[status])
    return f"{told}, {of_checksums} of them by their recorded checksums {_READS_BYTES}" if of_checksums else told


_READS_BYTES = "(holdfast verify reads the bytes)"


_WORDS = {
    "only in a": "only in the first", "only in b": "only in the second", "shape": "of another shape",
    "dtype": "of another type", "changed": "changed", "same": "the same",
}  # fmt: skip


def _show(
    a: Checkpoint, b: Checkpoint, of_tensors: list[list[Difference]], values: list[list[Difference]]
) -> None:  # fmt: skip
    tensors = [line[0] for line in of_tensors]
    names = [d for d in tensors if d.status != "changed"]
    output.table(
        ("name", "is", "first", "second"),
        ((d.name, _WORDS[d.status], _kind(a, d.name), _kind(b, d.name)) for d in names),
    )
    numbers = [d for d in tensors if d.norm is not None or d.status == "changed"]
    columns: dict[str, Callable[[Difference], object]] = {
        "tensor": lambda d: d.name,
        "relative": lambda d: _number(d.relative),
        "largest": lambda d: _number(d.largest),
        "mean": lambda d: _number(d.mean),
        "cosine": lambda d: "" if d.cosine is None else f"{d.cosine:.9f}",
        "norm first": lambda d: _number(d.norm_a),
        "norm second": lambda d: _number(d.norm_b),
        "NaN or Inf": lambda d: d.nonfinite or "",
    }
    if not any(d.nonfinite for d in numbers):
        del columns["NaN or Inf"]
    output.table(tuple(columns), ([cell(d) for cell in columns.values()] for d in numbers), gap=bool(names))
    output.table(("value", "first", "second"), map(partial(_value, a, b), values), gap=bool(tensors))


def _value(a: Checkpoint, b: Checkpoint, line: list[Difference]) -> tuple[str, str, str]:
    name = line[0].name
    if len(line) == 1:
        return name, _kind(a, name), _kind(b, name)
    parent, last = name.rpartition("/")[0], line[-1].name.rpartition("/")[2]
    items = f"{len(line)} items"
    first, second = (items, "none") if line[0].status == "only in a" else ("none", items)
    return f"{parent}/{name.rpartition('/')[2]} … {last}", first, second


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _kind(checkpoint: Checkpoint, name: str) -> str:
    """What a checkpoint holds under a name, in a few words."""
    if name in checkpoint.records:
        return typed(checkpoint.records[name].dtype, checkpoint.records[name].shape)
    if name in checkpoint.manifest.values:
        return brief(checkpoint.value(name))
    return f"differs by rank, of {checkpoint.world_size}" if name in checkpoint.differing else "none"
