"""`python -m tests.any_state --minutes 60 --seed 7`: trials until the time is up, counts at the end.

Prints what is wrong as it comes; ends with 1 if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import pool
from tests.any_state.trial import described, trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.any_state", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; the next ones count on")
    parser.add_argument("--trials", type=int, default=None, help="stop after so many")
    options = parser.parse_args()
    first = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    print(json.dumps({"seed": first}), flush=True)
    counts: Counter[str] = Counter()
    until = time.monotonic() + options.minutes * 60
    seed = first
    with tempfile.TemporaryDirectory(prefix="any-state-") as folder:
        while time.monotonic() < until and (options.trials is None or seed - first < options.trials):
            verdict, problems = trial(seed, Path(folder))
            counts[verdict] += 1
            if verdict == "wrong":
                print(json.dumps({"trial": described(seed), "wrong": problems[:6]}), flush=True)
            seed += 1
            pool.close_crowded()
    print(json.dumps({"trials": seed - first, **counts}), flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
