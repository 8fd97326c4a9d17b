"""Fuzz one target for some seconds: `python -m tests.fuzz.run TARGET SECONDS [--first SEED] [--found FOLDER]`.

With atheris, if it is there, guided by what parts of the library a change reaches; else by seeds alone. What is found
is written down (each fault once), and at the end the counts, as a line of JSON. `make fuzz` calls it for each target.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

FOUND = Path("fuzz-found")


class Tally:
    """What was tried, and what was found."""

    def __init__(self, target: str, found: Path) -> None:
        self.target, self.found = target, found
        self.began = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.faults: dict[tuple[str, str], str] = {}
        self.runs = self.opened = 0
        self.told = 0.0

    def note(self, made: dict[str, bytes], name: str, outcome: Any) -> None:
        """Count an outcome; keep what led to a fault that is new."""
        self.runs += 1
        self.opened += outcome.took.opened
        self.outcomes[outcome.fault.kind if outcome.fault else outcome.error or "read"] += 1
        if outcome.fault is None:
            return
        key = outcome.fault.kind, outcome.fault.where
        if key not in self.faults:
            place = self.found / f"{self.target}-{len(self.faults):03d}"
            self.faults[key] = str(place)
            shutil.rmtree(place, ignore_errors=True)  # of an earlier run
            for path, data in made.items():
                (place / "ckpt" / path).parent.mkdir(parents=True, exist_ok=True)
                (place / "ckpt" / path).write_bytes(data)
            text = f"{self.target} {name}\n{outcome.fault.kind} at {outcome.fault.where}\n\n{outcome.fault.text}\n"
            (place / "fault.txt").write_text(text, errors="surrogateescape")

    def tell(self, *, last: bool = False) -> None:
        """Write the counts down now and then: a run that is killed has told most."""
        now = time.monotonic()
        if not last and now - self.told < 10:
            return
        self.told = now
        line = {
            "target": self.target, "minutes": round((now - self.began) / 60, 1), "runs": self.runs,
            "opened": self.opened, "outcomes": dict(self.outcomes), "faults": len(self.faults),
        }  # fmt: skip
        self.found.mkdir(parents=True, exist_ok=True)
        (self.found / f"{self.target}.json").write_text(json.dumps(line) + "\n")
        if last:
            print(json.dumps(line), *self.faults.values(), sep="\n", flush=True)


def seeded(target: str, seconds: float, first: int, tally: Tally, folder: Path) -> None:
    """Changes by seed, one number after the other."""
    from tests.fuzz.targets import changed, seeds
    from tests.fuzz.trial import tried

    sound, number = seeds(target), first
    tally.began = time.monotonic()
    while time.monotonic() - tally.began < seconds:
        name, tree = sound[number % len(sound)]
        made = changed(target, tree, number)
        tally.note(made, f"{name} seed {number}", tried(target, made, folder))
        tally.tell()
        number += 1
    tally.tell(last=True)


def guided(target: str, seconds: float, first: int, tally: Tally, folder: Path, atheris: Any) -> None:
    """Changes that reach something new are changed further. An input is a sound checkpoint, a file of it, its bytes."""
    with atheris.instrument_imports(include=["holdfast"]):
        import holdfast  # noqa: F401
        from holdfast import checkpoint  # noqa: F401
    from importlib import import_module

    from tests.fuzz.mutate import mutated
    from tests.fuzz.targets import changed, seeds
    from tests.fuzz.trial import tried

    with atheris.instrument_imports(include=["holdfast"]):
        for reader in import_module("holdfast.formats.detect")._READERS:
            import_module(f"holdfast.formats.{reader}")
    sound = seeds(target)
    places = [(n, path) for n, (_, tree) in enumerate(sound) for path in sorted(tree)]
    many = len(places) > 400
    if many:
        places = Random(0).sample(places, 400)
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, (n, path) in enumerate(places):
        data = sound[n][1][path]
        if len(data) <= LONGEST:
            (corpus / str(i)).write_bytes(i.to_bytes(2, "little") + data)

    def split(data: bytes) -> tuple[str, dict[str, bytes]]:
        n, path = places[int.from_bytes(data[:2], "little") % len(places)]
        name, tree = sound[n]
        return name, {**tree, path: data[2:]}

    def one(data: bytes) -> None:
        name, made = split(data)
        if data[:2] == b"" or hash(data) % 8 == 0:  # what no single file can say: files missing, sums that fit again
            number = first + tally.runs
            name, tree = sound[number % len(sound)]
            made = changed(target, tree, number)
        tally.note(made, name, tried(target, made, folder))
        tally.tell()
        if time.monotonic() - tally.began > seconds:
            tally.tell(last=True)
            sys.stdout.flush()
            shutil.rmtree(folder, ignore_errors=True)
            import os

            os._exit(1 if tally.faults else 0)

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        if seed % 3:
            return (data[:2] + mutated(data[2:], seed))[:most]
        return bytes(atheris.Mutate(data, most))

    tally.began = time.monotonic()
    atheris.Setup(
        [
            "fuzz", str(corpus), f"-max_len={LONGEST + 2}", "-timeout=300", "-rss_limit_mb=6000", f"-seed={first + 1}",
            f"-artifact_prefix={tally.found}/{target}-", "-verbosity=0", "-print_final_stats=0", "-handle_int=0",
        ],
        one, custom_mutator=mutator,
    )  # fmt: skip
    atheris.Fuzz()


LONGEST = 400_000
"""Bytes of an input for the guided fuzzer."""


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("target")
    asked.add_argument("seconds", type=float)
    asked.add_argument("--first", type=int, default=0)
    asked.add_argument("--found", type=Path, default=FOUND)
    asked.add_argument("--plain", action="store_true", help="by seeds alone, even if atheris is there")
    told = asked.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    told.found.mkdir(parents=True, exist_ok=True)
    tally = Tally(told.target, told.found.resolve())
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
        tempfile.tempdir = folder
        atheris: Any = None
        if not told.plain:
            with suppress(ImportError):
                import atheris  # type: ignore[no-redef]
        if atheris is None:
            from tests.fuzz.trial import bound_memory

            bound_memory()
            seeded(told.target, told.seconds, told.first, tally, Path(folder))
        else:
            guided(told.target, told.seconds, told.first, tally, Path(folder), atheris)
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
