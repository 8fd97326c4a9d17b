"""Soak: `python -m tests.soak --minutes 60 --seed 7 --folder DIR`; see docs/trust.md.

One JSON line for each episode, the counts at the end. Ends with 1 at the first violation, with the command that
replays that episode, and leaves its folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from holdfast import manager as manager_module
from holdfast.run.tiers import outage, uploader
from tests.soak import mutants
from tests.soak.loop import Soak
from tests.soak.plan import first_of
from tests.soak.world import Violation, adopt


def main() -> int:
    options = _options()
    _prepare(options.mutant)
    seed, numbers = options.seed, itertools.count(options.first)
    if options.replay:
        seed, last = (int(word) for word in options.replay.split(":"))
        numbers = iter(range(first_of(seed, last), last + 1))
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak-")).absolute()
    print(json.dumps({"seed": seed, "folder": str(folder)}), flush=True)
    until = time.monotonic() + options.minutes * 60 if options.minutes else None
    soak = Soak(folder, seed)
    began = time.monotonic()
    for number in numbers:
        if until is not None and time.monotonic() > until and not options.replay:
            break
        if options.episodes is not None and soak.counts["episodes"] >= options.episodes:
            break
        try:
            print(json.dumps(soak.episode(number)), flush=True)
        except Exception as error:
            traceback.print_exc()
            what = "violation" if isinstance(error, Violation) else "error"
            replay = f"python -m tests.soak --replay {seed}:{number}"
            print(
                json.dumps({what: str(error), "episode": number, "replay": replay, "folder": str(soak.base)}),
                flush=True,
            )
            soak.abandon()
            return 1
        except BaseException:  # an interrupt, or SIGTERM: no process and no mount stays
            soak.close()
            raise
    soak.close()
    counts = {**soak.counts, "violations": 0, "seconds": round(time.monotonic() - began), "seed": seed}
    print(json.dumps({"counts": dict(sorted(counts.items()))}), flush=True)
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Random runs with random faults, checked."
    )
    parser.add_argument("--minutes", type=float, help="how long; without it, and without --episodes, for ever")
    parser.add_argument("--episodes", type=int, help="how many at most")
    parser.add_argument("--seed", type=int, default=None, help="drawn and told if it is not given")
    parser.add_argument("--first", type=int, default=0, help="the number of the first episode")
    parser.add_argument("--folder", help="where the runs lie; a temporary folder by default")
    parser.add_argument("--replay", metavar="SEED:EPISODE", help="this episode, and those of its run before it")
    parser.add_argument("--mutant", choices=sorted(mutants.MUTANTS), help="break the library, to see that it is found")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    return options


def _prepare(mutant: str | None) -> None:
    """This process is what all ranks are forked from: everything is imported, nothing has a thread."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    random.seed(0)
    adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    manager_module.SURVIVORS = 30.0
    outage.FIRST_PAUSE, uploader.LOOK = 0.05, 0.02
    if mutant:
        mutants.MUTANTS[mutant]()


if __name__ == "__main__":
    sys.exit(main())
