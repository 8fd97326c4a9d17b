"""``holdfast diff``: what differs between two checkpoints of any formats.

`app` calls it. It changes nothing, and ends with 0 if they are the same and with 1 if they differ, as `diff` does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.cli import output
from holdfast.cli.errors import Code
from holdfast.cli.options import Json, Source
from holdfast.cli.show import brief, typed
from holdfast.inspect.compare import Difference, compare, compare_names

_ORDER = ("only in a", "only in b", "shape", "dtype", "changed")


def diff(
    a: Source,
    b: Annotated[str, typer.Argument(help="Another one, of any format.")],
    tensors: Annotated[str, typer.Option("--tensors", metavar="GLOB", help="Only names that fit.")] = "*",
    names_only: Annotated[
        bool, typer.Option("--names-only", help="Names, shapes and dtypes; reads no tensor.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=0, help="How many to show, the largest first; 0: all.")] = 50,
    json: Json = False,
) -> None:
    """Compare names, shapes, dtypes and values; exit code 0 if all is the same, 1 if anything differs."""
    left, right = holdfast.open(a), holdfast.open(b)
    every = list(compare_names(left, right, only=tensors) if names_only else compare(left, right, only=tensors))
    differences = sorted((d for d in every if d.status != "same"), key=_by_size)
    counts = Counter[str](d.status for d in every)
    if json:
        shown = [output.fields(d, "relative") for d in (differences[:top] if top else differences)]
        output.as_json({"a": a, "b": b, "same": not differences, "counts": counts, "differences": shown})
    else:
        lines = _lines(left, right, differences)
        _show(left, right, lines[:top] if top else lines)
        if top and len(lines) > top:
            output.say(f"… and {sum(map(len, lines[top:]))} more (--top 0 shows all)")
        output.say(_summary(counts, names_only=names_only))
    raise typer.Exit(Code.DIFFERENT if differences else Code.FINE)


def _by_size(difference: Difference) -> tuple[int, float, list[tuple[int, str]]]:
    """Names first, then the largest changes; a change without finite values counts as the largest."""
    relative = -float("inf") if difference.relative is None else -difference.relative
    return _ORDER.index(difference.status), relative, _natural(difference.name)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value: 2 before 10."""
    parts = re.split(r"0*([0-9]+)", name)  # every other one is a number
    return [(len(part) if at % 2 else 0, part) for at, part in enumerate(parts)]


def _lines(a: Checkpoint, b: Checkpoint, differences: list[Difference]) -> list[list[Difference]]:
    """The differences of each line. Items of one list share a line if one checkpoint lacks them."""
    lines: dict[tuple[str, str], list[Difference]] = {}
    for d in differences:
        parent, _, last = d.name.rpartition("/")
        is_value = d.name not in a.records and d.name not in b.records
        is_item = is_value and d.status in ("only in a", "only in b") and last.isdigit()
        lines.setdefault((d.status, f"{parent}/" if is_item else d.name), []).append(d)
    return list(lines.values())


def _summary(counts: Counter[str], *, names_only: bool) -> str:
    if set(counts) == {"same"}:
        what = "names, shapes and dtypes" if names_only else "to the last bit"
        return f"the same, {what}: {counts['same']} names"
    return ", ".join(f"{counts[status]} {_WORDS[status]}" for status in (*_ORDER, "same") if counts[status])


_WORDS = {
    "only in a": "only in the first", "only in b": "only in the second", "shape": "of another shape",
    "dtype": "of another type", "changed": "changed", "same": "the same",
}  # fmt: skip


def _show(a: Checkpoint, b: Checkpoint, lines: list[list[Difference]]) -> None:
    values = [line for line in lines if line[0].name not in a.records and line[0].name not in b.records]
    tensors = [line[0] for line in lines if line[0].name in a.records or line[0].name in b.records]
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
    if names and numbers:
        output.say("")
    output.table(tuple(columns), ([cell(d) for cell in columns.values()] for d in numbers))
    if tensors and values:
        output.say("")
    output.table(("value", "first", "second"), map(partial(_value, a, b), values))


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
