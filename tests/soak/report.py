"""The counts of a soak as a table in docs/trust.md, between two marks.

`evidence.page` calls it and knows where the marks are. Never reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Mapping

BEGIN, END = "<!-- counts -->", "<!-- end of counts -->"


def table(counts: Mapping[str, int]) -> str:
    """What happened, then the faults, a line each, without blanks: the pages are counted in words."""
    kinds = sorted({key.partition(": ")[0] for key in counts if ": " in key})
    plain = {key: n for key, n in counts.items() if ": " not in key}
    minutes = round(plain.pop("seconds", 0) / 60)
    lines = [f"Seed {plain.pop('seed', '?')}, {minutes} minutes.", "", "| what | count |", "|---|---|"]
    lines += [f"|{key}|{n:,}|" for key, n in sorted(plain.items())]
    lines += ["", "| fault | injected | in the middle of a save | its moment never came |", "|---|---|---|---|"]
    for kind in kinds:
        told = [counts.get(f"{kind}: {what}", 0) for what in ("injected", "in the middle of a save", "missed")]
        lines.append(f"|{kind}|" + "|".join(f"{n:,}" for n in told) + "|")
    return "\n".join(lines)
