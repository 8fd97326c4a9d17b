"""The examples `holdfast_in_*.py`, for trainers that are not installed beside the tests, in the real trainers.

`rows` runs a training on two gloo ranks of the CPU (`train_*.py`) three times: whole, killed, and resumed, and compares
what they print. `make outside` prints the rows.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT
from tests.outside import ranks
from tests.outside.ranks import Row

HERE = Path(__file__).parent


class Recipe(NamedTuple):
    """A module of the examples, the package that it needs, and the script that imports it and trains."""

    package: str
    title: str
    script: str


class Life(NamedTuple):
    """What the ranks of a training printed of its steps and its end, and how they ended."""

    said: list[str]
    codes: list[int]
    errors: str


OLMO = Recipe("olmo_core", "holdfast_in_olmo.py", "train_olmo.py")
COMPOSER = Recipe("composer", "holdfast_in_composer.py", "train_composer.py")
VERL = Recipe("verl", "holdfast_in_verl.py", "train_verl.py")


def run(recipe: Recipe, folder: Path, *arguments: str, world: int = 2, **environment: str) -> Life:
    """Train until it ends or is killed. The recipe is a module in ``folder``."""
    (folder / recipe.title).write_text((ROOT / "examples" / recipe.title).read_text())
    command = [sys.executable, str(HERE / recipe.script), *arguments]
    ended = ranks.run(command, folder, [folder, ROOT], world, **environment)
    said = [line for out in ended.outputs for line in out.splitlines() if line.startswith(("step ", "end "))]
    return Life(said, ended.codes, ended.errors)


def goes_on(tried: str, whole: Life, resumed: Life, first: int) -> Row:
    """Whether a run that begins after step ``first`` prints what the whole one does."""
    later = [line for line in whole.said if line.startswith("end ") or int(line.split()[1].rstrip(":")) > first]
    passed = set(resumed.codes) == {0} and resumed.said == later and len(later) > 1
    return Row(tried, passed, "" if passed else f"{resumed.said} is not {later}\n{resumed.errors}")


def olmo(folder: Path) -> list[Row]:
    """OLMo-core's trainer with FSDP, saving beside training and not."""
    whole = run(OLMO, folder, str(folder / "whole"), "0", "holdfast")
    found = []
    for first, background in (("holdfast", ""), ("holdfast", "1"), ("torch", "")):
        root = str(folder / f"{first}{background}")
        run(OLMO, folder, root, "5", first, BACKGROUND=background)
        again = run(OLMO, folder, root, "0", "holdfast", BACKGROUND=background)
        # A save beside training may not have been done when the ranks were killed.
        begun = int(again.said[0].split()[1].rstrip(":")) - 1 if again.said else 4
        tried = f"OLMo-core: saved by {first}{' beside training' if background else ''}, killed, resumed with holdfast"
        found.append(goes_on(tried, whole, again, begun if background else 4))
    return found


def composer(folder: Path) -> list[Row]:
    """Composer's trainer with DDP: in an epoch, and at its end."""
    whole = run(COMPOSER, folder, str(folder / "whole"), "0")
    found = []
    for die in (9, 15):
        run(COMPOSER, folder, str(folder / f"killed{die}"), str(die))
        again = run(COMPOSER, folder, str(folder / f"killed{die}"), "0")
        found.append(goes_on(f"Composer: killed after step {die}, resumed from {die - 1}", whole, again, die - 1))
    return found


def verl(folder: Path) -> list[Row]:
    """verl's checkpoint manager, on FSDP1 and FSDP2, and on another number of ranks."""
    module = {"VERL_USE_EXTERNAL_MODULES": VERL.title.removesuffix(".py")}
    found = []
    for fsdp in ("1", "2"):
        whole = run(VERL, folder, str(folder / f"whole{fsdp}"), fsdp, "0", "4", **module)
        run(VERL, folder, str(folder / f"half{fsdp}"), fsdp, "0", "2", **module)
        again = run(VERL, folder, str(folder / f"half{fsdp}"), fsdp, "2", "4", **module)
        found.append(goes_on(f"verl: FSDP{fsdp}, resumed from step 2", whole, again, 2))
    alone = run(VERL, folder, str(folder / "half1"), "2", "2", "3", world=1, **module)
    passed = alone.codes == [0] and len(alone.said) == 2
    found.append(Row("verl: saved by 2 ranks with FSDP1, loaded by 1 with FSDP2", passed, alone.errors))
    return found


def rows() -> list[Row]:
    """All recipes whose trainers are installed; for the others a row that says so."""
    found = []
    for recipe, tries in ((OLMO, olmo), (COMPOSER, composer), (VERL, verl)):
        if importlib.util.find_spec(recipe.package) is None:
            found.append(Row(recipe.title, None, f"{recipe.package} is not installed"))
            continue
        with tempfile.TemporaryDirectory() as made:
            found.extend(tries(Path(made)))
    return found


def main() -> int:
    """Print the rows; 1 if one failed."""
    tried = rows()
    for row in tried:
        print(row)
    return 1 if any(row.passed is False for row in tried) else 0


if __name__ == "__main__":
    sys.exit(main())
