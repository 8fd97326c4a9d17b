"""Scripts of `examples/` on ranks that are killed as they print a certain line."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.trainers.lives import die

EXAMPLES = Path(__file__).parents[2] / "examples"


def play(script: str, root: Path, arguments: list[str], settings: dict[str, str], dies_at: str) -> list[str]:
    """What this rank of the script prints; it dies when it is about to print a line with ``dies_at`` in it."""
    printed: list[str] = []

    def tell(*words: Any, **_: Any) -> None:
        line = " ".join(map(str, words))
        if dies_at and dies_at in line:
            die()
        printed.append(line)

    os.environ.update(settings, ROOT=str(root))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    kept, builtins.print = builtins.print, tell
    try:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        builtins.print = kept
    return printed
