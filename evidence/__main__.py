"""`python -m evidence [run NAME… | stale]`: records runs, writes the part of docs/trust.md, says what is owed.

Without a word it writes the page; it ends with 1 if a run is missing, failed or stale. `make evidence` calls it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evidence import page
from evidence.record import NotRecorded, record
from evidence.runs import RUNS


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    runs = commands.add_parser("run", help="run these, and write a row for each and the page")
    runs.add_argument("names", nargs="+", choices=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    commands.add_parser("stale", help="the runs whose code has changed since")
    options = parser.parse_args(arguments)
    if options.command == "stale":
        print("\n".join(name for name, (state, _) in page.states().items() if state == "stale"))
        return 0
    if options.command == "run":
        return _record(options.names)
    _write_page()
    return _owed()


def _record(names: Sequence[str]) -> int:
    """Record one after the other; the page has what was recorded, also after an interruption."""
    fine = True
    try:
        for name in names:
            made = record(RUNS[name])
            print(f"{name}: {made.result} {'; '.join(made.why)}".rstrip(), file=sys.stderr)
            fine = fine and made.result == "passed"
    except NotRecorded as reason:
        print(reason, file=sys.stderr)
        fine = False
    _write_page()
    return 0 if fine else 1


def _write_page() -> None:
    page.PAGE.write_text(page.with_evidence(page.PAGE.read_text()))


def _owed() -> int:
    owed = {name: state for name, (state, _) in page.states().items() if state != "passed"}
    for name, state in owed.items():
        print(f"{name}: {state}")
    print(f"{len(RUNS) - len(owed)} of {len(RUNS)} runs passed on this code: {page.PAGE.name}#{page.anchor('NAME')}")
    return 1 if owed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
