"""``holdfast plan``: what a load on another mesh would read, without that mesh.

Called by `app`. Reads headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.inspect.mesh import parse_mesh, parse_rule
from holdfast.inspect.planning import Plan, RankReads
from holdfast.inspect.planning import plan as planned


def plan(
    path: Annotated[str, typer.Argument(help="A checkpoint of any format: a path or a URL.")],
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="How many ranks load it.")] = None,
    mesh: Annotated[str, typer.Option("--mesh", help='Axes, row-major: "replicate=2,fsdp=16,tp=2".')] = "",
    shard: Annotated[
        list[str] | None,
        typer.Option("--shard", metavar="GLOB=DIM", help="Where tensor parallelism cuts; GLOB=replicate: nowhere."),
    ] = None,
    tensors: Annotated[str, typer.Option("--tensors", metavar="GLOB", help="Only tensors whose names fit.")] = "*",
    node_size: Annotated[int, typer.Option("--node-size", min=1, help="Ranks of one node.")] = 8,
    alone: Annotated[bool, typer.Option("--no-share", help='As with share="off": each rank reads for itself.')] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Tell what each rank and node of a mesh would read of a checkpoint, in how many requests, and how evenly."""
    target, rules = parse_mesh(mesh, ranks), [parse_rule(text) for text in shard or ()]
    found = planned(holdfast.open(path), target, rules=rules, only=tensors, node_size=node_size, share=not alone)
    if json:
        totals = {name: getattr(found, name) for name in ("needed", "read", "requests", "balance")}
        output.as_json({**{name: getattr(found, name) for name in found.__dataclass_fields__}, **totals})
    else:
        _show(found)


def _show(found: Plan) -> None:
    count = len(found.ranks)
    together = "ranks that want the same read it together" if found.shares else "each rank reads for itself"
    output.say(f"{found.path} on {found.mesh} ({count} ranks, {found.node_size} a node): {together}")
    output.table(
        ("", "needs", "reads", "receives", "requests", "files"),
        [
            _row("in all", found.ranks, sum),
            _row("each rank, mean", found.ranks, lambda values: sum(values) // len(values)),
            _row("each rank, most", found.ranks, max),
            _row("each rank, least", found.ranks, min),
        ],
    )
    output.say("")
    output.say(f"the state has {output.size(found.state)}: {found.read / max(found.state, 1):.2f} times that is read, "
               f"and the busiest rank reads {found.balance:.2f} times the mean")  # fmt: skip
    if len(found.nodes) > 1:
        output.table(
            ("node", "needs", "reads", "requests"),
            ((n.node, output.size(n.needed), output.size(n.read), n.requests) for n in found.nodes[:_SHOWN]),
        )
        if len(found.nodes) > _SHOWN:
            output.say(f"… and {len(found.nodes) - _SHOWN} more nodes (--json has all)")


_SHOWN = 16


def _row(label: str, ranks: Sequence[RankReads], joined: Callable[[list[int]], int]) -> list[object]:
    found = [joined([getattr(r, what) for r in ranks]) for what in ("needed", "read", "received", "requests", "files")]
    return [label, *(output.size(n) for n in found[:3]), *found[3:]]
