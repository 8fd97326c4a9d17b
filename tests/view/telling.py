"""The journal of a run that was never trained, for tests of pages and for pictures of them.

Written by the code that a manager writes it with. Nothing in it was measured.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.run.journal import Entry, Now
from holdfast.run.journaling import Journal

HOSTILE = "</script><script>document.title='owned'</script>\u202e<img src=x onerror=alert(1)>"


def told(root: Any, saves: int = 120, *, start: float = 1_700_000_000.0, text: str = HOSTILE) -> list[Entry]:
    """The journal of a run of three starts, on 64, 32 and 64 ranks, with two failures and one save that was skipped."""
    entries, at = [], start
    cuts = (saves * 3 // 10, saves * 7 // 10)
    for number in range(1, saves + 1):
        at += 300.0 + (3600.0 if number in (cuts[0] + 1, cuts[1] + 1) else 0.0)
        outcome: Any = "saved"
        if number in (saves // 5, saves * 3 // 5):
            outcome = "failed"
        elif number == saves // 2:
            outcome = "skipped"
        saved = outcome == "saved"
        took = 18.0 + number % 5 + (14.0 if number % 37 == 0 else 0.0) if outcome != "skipped" else 0.0
        ranks = 32 if cuts[0] < number <= cuts[1] else 64
        stall = (0.6 if number % 43 == 0 else 0.03 + number % 7 * 0.004) if took else 0.0
        loss, error = 2.1 + 6 * math.exp(-number * 5 / saves), "" if saved else f"rank 3: {text}"
        written = 48_200_000_000 if number % 8 == 1 else 40_500_000_000
        phases = {"staging": took * 0.3, "writing": took * 0.6, "commit": took * 0.1}
        entries.append(
            Entry(
                number * 500, at, at + took if saved else None, took, stall,
                48_200_000_000 if saved else 0, ranks, loss, outcome, error, phases, number % 3, written,
                1.19 if ranks == 32 else 0.62, "aaaa" if number <= cuts[0] else "bbbb" if number <= cuts[1] else "cccc",
            )
        )  # fmt: skip
    journal = Journal(root)
    for late, name in enumerate(("aaaa", "bbbb", "cccc")):
        journal.start = name
        of_it = [entry for entry in entries if entry.start == name]
        for number, entry in enumerate(of_it):
            journal.add(entry)
            if number % 500 == 0:
                journal.settle(30)
        last = of_it[-1]
        where = Now(last.step + 100, at + late, 500, last.ranks, step_seconds=0.62, backlog=1)
        journal.tell(lambda: where, news=True)
        journal.settle(30)
    return entries
