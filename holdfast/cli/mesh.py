"""What ``holdfast show --mesh`` prints: what a load on another mesh would read, computed without that mesh.

`show` calls it. It reads headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import holdfast
from holdfast.cli import output
from holdfast.inspect.mesh import parse_mesh, parse_rule
from holdfast.inspect.planning import Plan, RankReads
from holdfast.inspect.planning import plan as planned
from holdfast.remap.remap import Remap


def show_plan(
    path: str, *, mesh: str, ranks: int | None, rules: Sequence[str], tensors: str, node_size: int, share: bool,
    remap: Remap | None, json: bool,
) -> None:  # fmt: skip
    """What each rank and node of a mesh would read of a checkpoint, in how many requests, and how evenly."""
    target, parsed = parse_mesh(mesh, ranks), [parse_rule(text) for text in rules]
    reads = planned(
        holdfast.open(path, remap=remap), target, rules=parsed, only=tensors, node_size=node_size, share=share
    )
    output.answer(output.fields(reads, "needed", "read", "requests", "balance"), lambda: _show(reads), json=json)


def _show(plan: Plan) -> None:
    count = len(plan.ranks)
    together = "ranks that want the same read it together" if plan.shares else "each rank reads for itself"
    output.say(f"{plan.path} on {plan.mesh} ({count} ranks, {plan.node_size} a node): {together}")
    output.table(
        ("", "needs", "reads", "receives", "requests", "files"),
        [
            _row("in all", plan.ranks, sum),
            _row("each rank, mean", plan.ranks, lambda values: sum(values) // len(values)),
            _row("each rank, most", plan.ranks, max),
            _row("each rank, least", plan.ranks, min),
        ],
    )
    output.say("")
    output.say(f"the state has {output.size(plan.state)}: {plan.read / max(plan.state, 1):.2f} times that is read, "
               f"and the busiest rank reads {plan.balance:.2f} times the mean")  # fmt: skip
    if len(plan.nodes) > 1:
        output.table(
            ("node", "needs", "reads", "requests"),
            ((n.node, output.size(n.needed), output.size(n.read), n.requests) for n in plan.nodes[:_SHOWN]),
        )
        if len(plan.nodes) > _SHOWN:
            output.say(f"… and {len(plan.nodes) - _SHOWN} more nodes (--json has all)")


_SHOWN = 16


def _row(label: str, ranks: Sequence[RankReads], joined: Callable[[list[int]], int]) -> list[object]:
    counts = [joined([getattr(r, what) for r in ranks]) for what in ("needed", "read", "received", "requests", "files")]
    return [label, *(output.size(n) for n in counts[:3]), *counts[3:]]
