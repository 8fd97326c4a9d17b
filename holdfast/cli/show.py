"""``holdfast show``: what a checkpoint holds, from the manifest alone; with ``--stats`` its numbers too.

`commands` calls it. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import typer

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.cli import output
from holdfast.cli.mesh import show_plan
from holdfast.cli.remaps import map_of, show_proof
from holdfast.cli.sizes import show_sizes
from holdfast.commit.sections import dropped_of
from holdfast.errors import HoldfastError
from holdfast.inspect.layout import Layouts
from holdfast.inspect.origins import described, origins_of
from holdfast.inspect.statistics import Statistics, statistics_of_all
from holdfast.inspect.tree import Leaf, tree
from holdfast.inspect.usage import usage
from holdfast.ondisk.containers import as_text
from holdfast.ondisk.packing import unpacked
from holdfast.ondisk.patterns import TENSOR, selector
from holdfast.remap.remapped import Remapped

SHOWN = 16
"""Values that are shown unless all are asked for."""

RANKS = 64
"""Ranks whose values are read to count how many of them differ."""


def show(
    *, path: str, tensors: str | None, depth: int | None, stats: bool, layout: bool, values: bool, sizes: bool,
    remap: str | None, mesh: str | None, ranks: int | None, shard: list[str] | None, node_size: int, alone: bool,
    json: bool,
) -> None:  # fmt: skip
    planned = mesh is not None or ranks is not None or bool(shard) or alone
    if sizes + planned + (stats or layout or values) > 1:
        raise typer.BadParameter("ask one at a time: --sizes, --mesh, or --stats, --layout and --values")
    under = map_of(remap)
    if sizes:
        show_sizes(path, tensors=tensors or "*", depth=depth, remap=under, json=json)
    elif planned:
        show_plan(
            path, mesh=mesh or "", ranks=ranks, rules=shard or [], tensors=tensors or "*", node_size=node_size,
            share=not alone, remap=under, json=json,
        )  # fmt: skip
    else:
        checkpoint = holdfast.open(path, remap=under)
        _show_contents(checkpoint, tensors=tensors, depth=depth, stats=stats, layout=layout, values=values, json=json)


def _show_contents(
    checkpoint: Checkpoint, *, tensors: str | None, depth: int | None, stats: bool, layout: bool, values: bool,
    json: bool,
) -> None:  # fmt: skip
    """Print the modules of a checkpoint, or the tensors that are asked for, and the rest of what it holds."""
    only = "*" if tensors is None else tensors
    wanted = selector(only, checkpoint.records, checkpoint.path, said="", what=TENSOR)
    chosen = list(filter(wanted, checkpoint.records))
    layouts = Layouts(checkpoint)
    statistics = {s.name: s for s in statistics_of_all(checkpoint, chosen)} if stats else {}
    if json:
        output.as_json(_as_json(checkpoint, chosen, layouts, statistics, cells=layout))
        return
    _show_head(checkpoint)
    if tensors is not None or stats or layout:
        _show_tensors(checkpoint, chosen, layouts, statistics)
    else:
        _show_tree(checkpoint, layouts, depth)
    if layout:
        for name in chosen:
            output.table((name, "file"), layouts.boxes(name))
    if tensors is None:
        _show_rest(checkpoint, everything=values)
    if isinstance(checkpoint.reader, Remapped):
        output.say("")
        show_proof(checkpoint.reader.proof())


def _show_head(checkpoint: Checkpoint) -> None:
    record = checkpoint.manifest
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    run = f", run {checkpoint.run}" if checkpoint.run else ""
    saved = f", saved {record.created}" if record.created else ", saved"
    ranks = f" by {output.count(checkpoint.world_size, 'rank')}"
    output.say(f"{checkpoint.path}: {checkpoint.format}{step}{saved}{ranks}{run}")
    if checkpoint.reading:
        output.say(f"read as: {checkpoint.reading}")
    total = usage(checkpoint)
    cited = f", {output.size(total.cited)} of them reused from older steps" if total.cited else ""
    output.say(f"{output.count(len(record.tensors), 'tensor')} of {output.size(total.tensors)} in "
               f"{output.count(len(record.files), 'file')}{cited}; "
               + ", ".join(f"{a.name} {output.size(a.nbytes)}" for a in total.by_dtype))  # fmt: skip
    producer = [f"{key} {text}" for key, text in record.producer.items() if key != "kinds" and len(text) < 100]
    if producer:
        output.say("made by " + ", ".join(producer))
    if lost := dropped_of(record):
        output.say(f"lost since it was saved: {', '.join(lost)}")
    output.say("")


def _show_tree(checkpoint: Checkpoint, layouts: Layouts, depth: int | None) -> None:
    records = checkpoint.manifest.tensors

    def note(name: str) -> str:
        if checkpoint.remap is None:
            return str(layouts.of(name))
        return described(name, origins_of(checkpoint, name), folded=True) or "itself"

    top = tree(Leaf(name, r.nbytes, prod(r.shape), (r.dtype, r.shape), note(name)) for name, r in records.items())
    rows = []
    for level, node in top.walk(deepest=depth):
        ended = depth is not None and level + 1 == depth
        kind, times = "", "" if node.tensors == 1 else f"{node.tensors} tensors"
        if node.leaf is not None:
            kind = typed(records[node.leaf.name].dtype, records[node.leaf.name].shape)
            times = "" if node.tensors == 1 else f"×{node.tensors}"
        elif not ended and not level:
            times = f"{node.tensors} tensors"
        cut = "" if node.leaf is None else node.leaf.note or "varies"
        rows.append(("  " * level + node.label, kind, times, output.size(node.nbytes), cut))
    output.table(("tensor", "type", "", "bytes", "cut" if checkpoint.remap is None else "from"), rows)


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """``bfloat16 [4096, 1024]``."""
    return f"{dtype} {list(shape)}"


def _show_tensors(
    checkpoint: Checkpoint, chosen: list[str], layouts: Layouts, statistics: dict[str, Statistics]
) -> None:  # fmt: skip
    columns = ["tensor", "type", "bytes", "cut"]
    if checkpoint.remap is not None:
        columns += ["from"]
    if statistics:
        columns += ["min", "max", "mean", "std", "NaN", "Inf", "zeros"]

    def row(name: str) -> Iterator[Any]:
        record = checkpoint.records[name]
        tied = checkpoint.manifest.aliases.get(name, name)
        yield name if tied == name else f"{name} = {tied}"
        yield from (typed(record.dtype, record.shape), output.size(record.nbytes), layouts.of(name))
        if checkpoint.remap is not None:
            yield described(name, origins_of(checkpoint, name))
        if statistics:
            s = statistics[name]
            yield from ("" if x is None else f"{x:.4g}" for x in (s.min, s.max, s.mean, s.std))
            yield from (s.nan, s.inf, s.zeros)

    output.table(columns, (list(row(name)) for name in chosen))


def _show_rest(checkpoint: Checkpoint, *, everything: bool) -> None:
    record = checkpoint.manifest
    output.table(("tied", "to"), record.aliases.items(), gap=True)
    paths = list(record.values)
    shown = paths if everything else _first(paths)
    output.table(("value", "is"), ((path, brief(checkpoint.value(path), everything)) for path in shown), gap=True)
    if len(shown) < len(paths):
        output.say(f"… and {output.count(len(paths) - len(shown), 'more value')} (--values shows all)")
    by_rank = ((path, _by_rank(checkpoint, path) if everything else "") for path in checkpoint.differing)
    output.table(("value of each rank", output.count(checkpoint.world_size, "rank")), by_rank, gap=True)
    attached = ((name, output.size(nbytes)) for name, nbytes in checkpoint.attachments.items())
    output.table(("attached", "bytes"), attached, gap=True)
    output.table(("left out", "why"), checkpoint.left_out.items(), gap=True)


def _first(paths: list[str]) -> list[str]:
    """The paths nearest to the top, in order: the step comes before the settings of each parameter group."""
    nearest = sorted(paths, key=lambda path: path.count("/"))[:SHOWN]
    return [path for path in paths if path in set(nearest)]


def brief(value: object, everything: bool = False) -> str:
    """A value as text, cut short unless all of it is asked for."""
    text = repr(value) if everything else as_text(value)
    return text if everything or len(text) <= 70 else f"{text[:69]}…"


def _by_rank(checkpoint: Checkpoint, path: str) -> str:
    """The value of the first rank, and how many different ones there are."""
    ranks = range(min(checkpoint.world_size, RANKS))
    try:
        values = [repr(checkpoint.per_rank(path, rank)) for rank in ranks]
    except (HoldfastError, LookupError) as error:
        return f"cannot be read: {error}"
    kinds = len(set(values))
    first = values[0] if len(values[0]) <= 60 else f"{values[0][:59]}…"
    return f"{kinds} different; rank 0: {first}" if kinds > 1 else f"the same on all that were read: {first}"


def _as_json(
    checkpoint: Checkpoint, chosen: list[str], layouts: Layouts, statistics: dict[str, Statistics], *, cells: bool
) -> dict[str, object]:
    record = checkpoint.manifest

    def one(name: str) -> dict[str, object]:
        tensor, layout = checkpoint.records[name], layouts.of(name)
        entry: dict[str, object] = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "nbytes": tensor.nbytes,
                                    "cells": layout.cells, "grid": layout.grid, "ranks": layout.ranks}  # fmt: skip
        if name in record.aliases:
            entry["tied"] = record.aliases[name]
        if checkpoint.remap is not None:
            entry["from"] = [name] if (origins := origins_of(checkpoint, name)) is None else origins
        if cells:
            entry["boxes"] = layouts.boxes(name)
        if statistics:
            entry["stats"] = {key: getattr(statistics[name], key) for key in _STATS}
        return entry

    return {
        "path": str(checkpoint.path), "format": checkpoint.format, "reading": checkpoint.reading,
        "step": checkpoint.step, "run": checkpoint.run or None, "created": record.created or None,
        "world_size": checkpoint.world_size, "producer": record.producer, "lost": dropped_of(record),
        "nbytes": checkpoint.nbytes, "files": len(record.files), "tensors": [one(name) for name in chosen],
        "values": {path: unpacked(value) for path, value in record.values.items()},
        "per_rank": checkpoint.differing, "attachments": checkpoint.attachments,
        "left_out": checkpoint.left_out,
        **({"map": checkpoint.reader.proof()} if isinstance(checkpoint.reader, Remapped) else {}),
    }  # fmt: skip


_STATS = ("count", "nan", "inf", "zeros", "min", "max", "mean", "std", "norm")
