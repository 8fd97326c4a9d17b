"""`make outside SRC=folder`: other projects' tests with torch and with holdfast, and the table of what passes.

Ends with 1 if a suite that could run passes fewer tests than `suites.py` asks for.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from functools import cache
from pathlib import Path

from tests.outside import recipes, resume_titan
from tests.outside.suites import SUITES, Suite

HERE = Path(__file__).parent


@cache
def passed(tests: tuple[str, ...], checkout: Path, sources: str, shim: str | None) -> dict[str, bool]:
    """Each of the tests that was not skipped, and whether it passed."""
    # The shims are imported from this folder, as checkouts have a package called tests, too.
    paths = [checkout / sources, HERE, HERE.parents[1]]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", "-o", "addopts=",
            f"--junitxml={report}", *(["-p", shim] if shim else []),
        ]  # fmt: skip
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise SystemExit(f"{checkout}: pytest made no report\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
        cases = xml.parse(report).getroot().iter("testcase")
        return {
            f"{'.'.join(case.get('classname', '').split('.')[-2:])}::{case.get('name')}": not len(case)
            for case in cases
            if case.find("skipped") is None
        }


def missing(suite: Suite, source: Path) -> str | None:
    """Why a suite cannot run; None if it can."""
    if not (source / suite.checkout).is_dir():
        return f"there is no {source / suite.checkout}: put a checkout of commit {suite.commit} there"
    lacking = [name for name in suite.needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def run(suite: Suite, source: Path) -> bool:
    """Run one suite twice and print what came of it. False if too few tests pass."""
    checkout = source / suite.checkout
    with_torch = passed(suite.tests, checkout, suite.sources, suite.both)
    ours = passed(suite.tests, checkout, suite.sources, suite.shim)
    counted = [name for name, good in with_torch.items() if good]
    failed = [name for name in counted if not ours.get(name, False)]
    good = len(counted) - len(failed)
    print(f"{suite.name}: {good} of the {len(counted)} that pass with torch (at least {suite.passes}); {suite.commit}")
    for name in failed:
        print(f"    failed: {name}: {suite.reasons.get(name, 'no reason is known')}")
    return good >= suite.passes


def main(source: Path) -> int:
    """Run all suites for which ``source`` has a checkout."""
    fine = True
    for suite in SUITES:
        why = missing(suite, source)
        if why is None:
            fine = run(suite, source) and fine
        else:
            print(f"{suite.name}: left out, {why}")
        if suite.checkout == "torchtitan" and why is None:
            for row in resume_titan.rows(source / suite.checkout):
                print(f"torchtitan's trainer, 2 ranks: {row}")
                fine = fine and row.passed is not False
    for row in recipes.rows():
        print(row)
        fine = fine and row.passed is not False
    return 0 if fine else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("make outside SRC=folder, a folder with checkouts: see tests/outside/__init__.py")
    sys.exit(main(Path(sys.argv[1]).resolve()))
