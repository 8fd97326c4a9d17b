"""``holdfast du``: where the bytes of a checkpoint are, or those of all steps of a run.

Called by `app`. Deletes nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.errors import Mismatch, NotACheckpoint
from holdfast.inspect.usage import RootUsage, Usage, modules, usage, usage_of_root


def du(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a folder of steps: a path or a URL.")],
    depth: Annotated[int, typer.Option("--depth", min=1, help="How many levels of modules to show.")] = 2,
    tensors: Annotated[str, typer.Option("--tensors", metavar="GLOB", help="Only tensors whose names fit.")] = "*",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Bytes by section, module and dtype; of a folder of steps, what they share and what deleting each would free."""
    try:
        checkpoint = holdfast.open(path)
    except NotACheckpoint:
        found = usage_of_root(path)
        if tensors != "*":
            raise Mismatch(f"{path} is a folder of steps: --tensors looks into one of them") from None
        output.as_json(found) if json else _show_root(found)
        return
    total, top = usage(checkpoint, only=tensors), modules(checkpoint, only=tensors)
    rows = [(level, node) for level, node in top.walk(deepest=depth)]
    if json:
        below = [
            {"module": n.label, "level": level, "tensors": n.tensors, "elements": n.elements, "nbytes": n.nbytes}
            for level, n in rows
        ]
        output.as_json({**{name: getattr(total, name) for name in total.__dataclass_fields__}, "modules": below})
        return
    _show(total, checkpoint.reading)
    output.table(
        ("module", "tensors", "bytes", "of all"),
        (("  " * level + n.label, n.tensors, output.size(n.nbytes), _share(n.nbytes, total)) for level, n in rows),
    )


def _show(total: Usage, reading: str) -> None:
    cited = f", {output.size(total.cited)} of them borrowed from older steps" if total.cited else ""
    attached = f"; {output.size(total.attached)} attached" if total.attached else ""
    output.say(f"{total.path} ({total.format}): {output.size(total.tensors)} of tensors in files of "
               f"{output.size(total.files)}{cited}{attached}")  # fmt: skip
    if reading:
        output.say(f"read as: {reading}")
    for heading, amounts in (("section", total.by_section), ("dtype", total.by_dtype)):
        output.table(
            (heading, "tensors", "elements", "bytes", "of all"),
            ((a.name, a.tensors, f"{a.elements:,}", output.size(a.nbytes), _share(a.nbytes, total)) for a in amounts),
        )
        output.say("")


def _share(nbytes: int, total: Usage) -> str:
    return f"{100 * nbytes / total.tensors:.1f} %" if total.tensors else ""


def _show_root(found: RootUsage) -> None:
    output.table(
        ("step", "bytes", "shared", "deleting it frees"),
        ((s.name, output.size(s.nbytes), output.size(s.shared), output.size(s.frees)) for s in found.steps),
    )
    left = f", {output.size(found.leavings)} of which no checkpoint needs" if found.leavings else ""
    output.say(f"{found.path}: {output.size(found.nbytes)} in all, each file once{left}")
