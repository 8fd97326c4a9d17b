"""A torchtitan training on two gloo ranks, killed and resumed with its configuration changed in one line.

`rows` runs torchtitan's own trainer (`train_titan.py`) and compares the losses, as they are printed, with those of a
run that nobody killed. `make outside` prints the rows.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.outside import ranks
from tests.outside.ranks import Row

SCRIPT = Path(__file__).with_name("train_titan.py")
ALL, DIES = 6, 5
KEPT = "last_save_model_only=False"
WAYS = (
    ("holdfast", "holdfast", "saved and resumed with holdfast's manager"),
    ("torchtitan", "holdfast", "saved with torchtitan's manager, resumed with holdfast's"),
    ("over_dcp", "over_dcp", "saved and resumed with torchtitan's own manager over holdfast.dcp"),
)
"""Whose manager saves (see `train_titan.py`), whose resumes, and what is said of it."""


class Life(NamedTuple):
    """The losses that a run's first rank printed, and how its ranks ended."""

    losses: list[str]
    codes: list[int]
    errors: str


def run(checkout: Path, manager: str, folder: Path, *settings: str, world: int = 2) -> Life:
    """Train with ``manager`` until it ends or is killed."""
    command = [sys.executable, str(SCRIPT), manager, str(folder), *settings]
    ended = ranks.run(command, checkout, [checkout, Path(__file__).parents[2]], world)
    losses = [line for line in ended.outputs[0].splitlines() if line.startswith("step ")]
    return Life(losses, ended.codes, ended.errors)


def rows(checkout: Path) -> list[Row]:
    """Each way to be killed and resumed."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole = run(checkout, "holdfast", folder / "whole", f"steps={ALL}", KEPT)
        if whole.codes != [0, 0]:
            return [Row("trains to the end", False, whole.errors)]
        found = [Row("trains to the end", len(whole.losses) == ALL, "\n".join(whole.losses))]
        for first, second, said in WAYS:
            mode = "async_mode='disabled'" if first == "torchtitan" else "async_mode='async'"
            killed = run(checkout, first, folder / first, f"steps={ALL}", f"die={DIES}", mode, KEPT)
            again = run(checkout, second, folder / first, f"steps={ALL}", mode, KEPT)
            resumed = killed.codes == [-signal.SIGKILL] * 2 and again.codes == [0, 0]
            passed = resumed and again.losses == whole.losses[4:]
            tried = f"killed after step {DIES}, resumed from step 4: {said}"
            why = "" if passed else f"{again.losses} is not {whole.losses[4:]}\n{killed.errors}\n{again.errors}"
            found.append(Row(tried, passed, why))
        return [*found, seed(checkout, folder)]


def seed(checkout: Path, folder: Path) -> Row:
    """A seed checkpoint, made by one rank, begins a training on two."""
    run(checkout, "holdfast", folder / "seed", "steps=1", "create_seed_checkpoint=True", world=1)
    made = (folder / "seed" / "checkpoint" / "step-0" / "manifest.json").is_file()
    trained = run(checkout, "holdfast", folder / "seed", "steps=2", KEPT)
    steps = sorted(path.name for path in (folder / "seed" / "checkpoint").iterdir())
    passed = made and trained.codes == [0, 0] and len(trained.losses) == 2 and steps == ["step-0", "step-2"]
    return Row("a seed checkpoint of one rank begins a training on two", passed, "" if passed else f"{steps} {trained}")


if __name__ == "__main__":
    for row in rows(Path(sys.argv[1])):
        print(row)
