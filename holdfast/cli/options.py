"""What the sizes and times that are given to options mean.

Commands call it. It reads no file.
"""

from __future__ import annotations

import re

import typer

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def bytes_of(text: str) -> int:
    """``5GB``, ``512 MiB`` or a plain number of bytes. Raises typer.BadParameter."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}
    digits = text.strip().lower().rstrip("bikmgt ")
    try:
        nbytes = float(digits) * units[text.strip().lower()[len(digits) :].strip()]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text} is not a size: write 512MB, 5GB or 16GiB") from None
    if not 1 <= nbytes < 2**63:
        raise typer.BadParameter(f"{text} is not a size: it must be at least one byte")
    return int(nbytes)


def seconds_of(text: str) -> float:
    """``90``, ``30m``, ``8h`` or ``2d`` in seconds. Raises typer.BadParameter."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if parts is None or parts[2] not in _SECONDS or not float(parts[1]) > 0:
        raise typer.BadParameter(f"{text} is not a time: write 90s, 30m, 8h or 2d")
    return float(parts[1]) * _SECONDS[parts[2]]
