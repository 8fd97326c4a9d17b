"""The page of a diff: how far two checkpoints are apart, by layer and kind of parameter, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.inspect.compare import Difference, compare
from holdfast.ondisk.patterns import Patterns
from holdfast.view.page import page

SCRIPTS = ("table.js", "heatmap.js", "diff.js")

_PARTS = re.compile(r"[^./\[\]]+|[./\[\]]+")


def diff_page(a: Checkpoint, b: Checkpoint, *, only: Patterns = "*") -> str:
    """The page as one HTML document: how ``b`` differs from ``a``. Raises what reading raises."""
    return page(f"{a.path.name} and {b.path.name} · holdfast", SCRIPTS, contents(a, b, compare(a, b, only=only)))


def contents(a: Checkpoint, b: Checkpoint, differences: Iterable[Difference]) -> dict[str, Any]:
    """What the page shows: a row for each name, with its place on the map."""
    kinds: dict[str, int] = {}
    rows = []
    for one in differences:
        kind, layer = placed(one.name)
        number = kinds.setdefault(kind, len(kinds))
        rows.append([
            one.name, one.status, one.nbytes, one.relative, one.cosine, one.largest, one.mean, one.norm, one.norm_a,
            one.norm_b, one.nonfinite, number, layer, one.by_checksums,
        ])  # fmt: skip
    return {"a": _about(a), "b": _about(b), "kinds": list(kinds), "rows": rows}


def placed(name: str) -> tuple[str, int | None]:
    """The kind of a parameter and its layer: ``model/layers.3.attn.q`` is ``model/layers.*.attn.q`` of layer 3.

    The first number in a name is the layer; later ones, as of experts, make no kinds of their own.
    """
    layer = None
    parts = _PARTS.findall(name)
    for at, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) < 7:
            layer = int(part) if layer is None else layer
            parts[at] = "*"
    return "".join(parts), layer


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "name": checkpoint.path.name,
        "step": checkpoint.step,
        "format": checkpoint.format,
        "bytes": checkpoint.nbytes,
        "created": checkpoint.manifest.created,
        "run": checkpoint.manifest.run,
    }
