"""What ``--sizes`` prints: where the bytes of a checkpoint are, or those of all steps of a run.

`ls` and `show` call it. It deletes nothing.
"""

from __future__ import annotations

import holdfast
from holdfast.cli import output
from holdfast.errors import Mismatch, NotACheckpoint
from holdfast.inspect.tree import Node
from holdfast.inspect.usage import RootUsage, Usage, modules, usage, usage_of_root
from holdfast.remap.remap import Remap


def show_sizes(
    path: str, *, tensors: str = "*", depth: int | None = None, remap: Remap | None = None, json: bool
) -> None:  # fmt: skip
    """Bytes by section, dtype and module; of a run, what its steps share and what deleting each would free."""
    try:
        checkpoint = holdfast.open(path, remap=remap)
    except NotACheckpoint:
        of_run = usage_of_root(path)
        if tensors != "*" or remap is not None:
            raise Mismatch(f"{path} is a run: --tensors and --remap are for one of its steps") from None
        output.answer(of_run, lambda: _show_run(of_run), json=json)
        return
    total, top = usage(checkpoint, only=tensors), modules(checkpoint, only=tensors)
    rows = [(level, node) for level, node in top.walk(deepest=depth or 2)]
    below = [
        {"module": n.label, "level": level, "tensors": n.tensors, "elements": n.elements, "nbytes": n.nbytes}
        for level, n in rows
    ]
    output.answer(output.fields(total) | {"modules": below}, lambda: _show(total, checkpoint.reading, rows), json=json)


def _show(total: Usage, reading: str, rows: list[tuple[int, Node]]) -> None:
    reused = f", {output.size(total.cited)} of them reused from older steps" if total.cited else ""
    attached = f"; {output.size(total.attached)} attached" if total.attached else ""
    output.say(f"{total.path} ({total.format}): {output.size(total.tensors)} of tensors in files of "
               f"{output.size(total.files)}{reused}{attached}")  # fmt: skip
    if reading:
        output.say(f"read as: {reading}")
    for heading, amounts in (("section", total.by_section), ("dtype", total.by_dtype)):
        output.table(
            (heading, "tensors", "elements", "bytes", "of all"),
            ((a.name, a.tensors, f"{a.elements:,}", output.size(a.nbytes), _share(a.nbytes, total)) for a in amounts),
        )
        output.say("")
    output.table(
        ("module", "tensors", "bytes", "of all"),
        (("  " * level + n.label, n.tensors, output.size(n.nbytes), _share(n.nbytes, total)) for level, n in rows),
    )


def _share(nbytes: int, total: Usage) -> str:
    return f"{100 * nbytes / total.tensors:.1f} %" if total.tensors else ""


def _show_run(run: RootUsage) -> None:
    output.table(
        ("step", "bytes", "shared", "deleting it frees"),
        ((s.name, output.size(s.nbytes), output.size(s.shared), output.size(s.frees)) for s in run.steps),
    )
    unneeded = f"; no checkpoint needs {output.size(run.leavings)} of them" if run.leavings else ""
    output.say(f"{run.path}: {output.size(run.nbytes)} in all, each file once{unneeded}")
