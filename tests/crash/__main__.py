"""All crash states, counted: ``python -m tests.crash [--quick] [--seed N] [OPERATION ...]``.

Prints a line for each operation and a sum. Exits with 1 if any state is lost or mixed, or cannot be gone on from.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterator

from tests.crash import operations
from tests.crash.judge import Report, judge
from tests.crash.profiles import PROFILES, Limits, State, states
from tests.crash.runs import Run

QUICK = Limits(names=6, bytes=4, states=6)
FULL = Limits(names=24, bytes=12, states=32)


def killed_and_again(*, quick: bool, seed: int) -> Iterator[tuple[str, Run]]:
    """Deaths before the cut, at each operation of a save, and cuts during what a restart does after a cut."""
    for managed in (True, False):
        for at in range(0, operations.calls_of_a_save(managed=managed), 7 if quick else 1):
            yield "killed", operations.killed(at, managed=managed)
    for name in ("save over", "sweep", "incremental", "background"):
        run = operations.OPERATIONS[name]()
        for state in sampled(run, 2 if quick else 24, seed):
            yield "again", operations.again(run, state)


def sampled(run: Run, count: int, seed: int) -> list[State]:
    """Some states of a run, of all cuts and profiles."""
    chance = random.Random(seed)
    found = [
        s for p in PROFILES.values() for s in states(run.trace, p, Limits(3, 2, 3), seed, every=5, since=run.since)
    ]
    return chance.sample(found, min(count, len(found)))


def check(name: str, *, quick: bool, seed: int) -> list[Report]:
    """Check one operation, or `killed_and_again`."""
    limits = QUICK if quick else FULL
    if name == "killed and again":
        found: dict[str, Report] = {}
        for kind, run in killed_and_again(quick=quick, seed=seed):
            one = judge(
                run, PROFILES.values(), QUICK if quick else Limits(12, 8, 12), seed=seed, every=9 if quick else 4
            )
            found[kind] = found[kind].joined(one) if kind in found else one.named(kind)
        return list(found.values())
    run = operations.OPERATIONS[name]()
    return [judge(run, PROFILES.values(), limits, seed=seed, every=max(len(run.trace.ops) // 20, 1) if quick else 1)]


def main(arguments: list[str]) -> int:
    names = [*operations.OPERATIONS, "killed and again"]
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(names))
    told = parser.parse_args(arguments)
    asked = [(name, told.quick, told.seed) for name in told.operations or names]
    total: Counter[str] = Counter()
    print(f"{'operation':26} {'calls':>6} {'built':>8} {'distinct':>8} {'saved to':>8}  faults")
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for reports in pool.imap(_check, asked, chunksize=1):
            for report in reports:
                faults = ", ".join(f"{count} {kind}" for kind, count in report.faults.items()) or "none"
                counts = f"{report.calls:6} {report.states:8} {report.distinct:8} {report.saved_to:8}"
                print(f"{report.run:26} {counts}  {faults}", flush=True)
                for violation in report.violations:
                    print(f"    {violation}")
                total["built"] += report.states
                total["distinct"] += report.distinct
                total["saved to"] += report.saved_to
                total["faults"] += report.faults.total()
                total.update({f"by {profile}": count for profile, count in report.by_profile.items()})
    print(", ".join(f"{count} {what}" for what, count in total.items()))
    return 1 if total["faults"] else 0


def _check(asked: tuple[str, bool, int]) -> list[Report]:
    name, quick, seed = asked
    return check(name, quick=quick, seed=seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
