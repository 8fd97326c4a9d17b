"""``holdfast copy``: copy checkpoints from one place to another, and check every block on the way.

`commands` calls it. It never changes the source.
"""

from __future__ import annotations

import holdfast
from holdfast.cli import output
from holdfast.cli.options import bytes_of
from holdfast.copy import Copied


def copy(*, source: str, target: str, overwrite: bool, bandwidth: str | None, json: bool) -> None:
    limit = None if bandwidth is None else float(bytes_of(bandwidth))
    done = holdfast.copy(source, target, overwrite=overwrite, bandwidth=limit)
    steps = {name: _plain(step) for name, step in done.steps.items()}
    output.answer(_plain(done) | {"steps": steps}, lambda: _show(done), json=json)


def _show(done: Copied) -> None:
    output.table(
        ("step", "copied", "were there", ""),
        (
            (
                name, output.size(step.stats.nbytes), step.stats.skipped,
                "new" if step.committed else "the same was there",
            )
            for name, step in done.steps.items()
        ),
    )  # fmt: skip
    stats = done.stats
    there = f", {stats.skipped} files were there" if stats.skipped else ""
    what = f"{len(done.steps)} steps" if done.steps else "copied" if done.committed else "the same checkpoint was there"
    output.say(
        f"{done.target}: {what}; {output.count(stats.files, 'file')}, {output.size(stats.nbytes)} copied{there}, "
        f"{done.seconds:.1f} s"
    )


def _plain(done: Copied) -> dict[str, object]:
    return {
        "source": done.source, "target": done.target, "committed": done.committed, "seconds": done.seconds,
        "files": done.stats.files, "nbytes": done.stats.nbytes, "skipped": done.stats.skipped,
    }  # fmt: skip
