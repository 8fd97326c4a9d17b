"""``holdfast convert``: a checkpoint in another format.

Called by `app`. Never loses a name without saying so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Annotated

import torch
import typer

import holdfast
from holdfast.cli import output
from holdfast.export.huggingface import Extras
from holdfast.export.work import Converted
from holdfast.read.ranges import Verify
from holdfast.storage.urls import location


class Format(str, Enum):
    """What can be written."""

    holdfast = "holdfast"
    torch = "torch"
    dcp = "dcp"
    huggingface = "huggingface"


class Check(str, Enum):
    """How much of the source is checked while it is read."""

    yes = "yes"
    blocks = "blocks"
    no = "no"


EXTRAS = (
    "For huggingface: config.json and the tokenizer's files, or a folder that has them, such as the base model's; "
    "weights in it are left. May come again."
)
_VERIFY: dict[Check, Verify] = {Check.yes: True, Check.blocks: "blocks", Check.no: False}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype_of(text: str | None) -> torch.dtype | None:
    """The dtype of a name as torch has it, or as people say it. Raises typer.BadParameter."""
    found = None if text is None else getattr(torch, _SHORT.get(text, text), None)
    if text is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise typer.BadParameter(f"--dtype {text} is no floating dtype of torch: bfloat16, float16, float32, float64, …")


def renames_of(pairs: list[str] | None) -> dict[str, str] | None:
    """``OLD=NEW`` as a table. Raises typer.BadParameter."""
    for pair in pairs or ():
        if "=" not in pair:
            raise typer.BadParameter(f"--rename {pair} is not OLD=NEW")
    return {old: new for old, _, new in (pair.partition("=") for pair in pairs)} if pairs else None


def bytes_of(text: str) -> int:
    """``5GB``, ``512 MiB`` or a plain number of bytes. Raises typer.BadParameter."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}
    digits = text.strip().lower().rstrip("bikmgt ")
    try:
        found = float(digits) * units[text.strip().lower()[len(digits) :].strip()]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text} is no size: 512MB, 5GB, 16GiB, …") from None
    if not 1 <= found < 2**63:
        raise typer.BadParameter(f"{text} is no size: at least a byte")
    return int(found)


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint of any format: a path or a URL.")],
    target: Annotated[str, typer.Argument(help="Where the new one is to be: a path or a URL.")],
    to: Annotated[Format, typer.Option("--to", help="The format.")] = Format.holdfast,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Names of the source, or patterns. May come again."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="A name or a leading path; NEW may be empty. May come again."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="What floating tensors become: bfloat16, …")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step to be noted, in holdfast's own format.")] = None,
    shard: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of tensors in one file.")] = "5GB",
    extras: Annotated[
        list[str] | None,
        typer.Option("--extras", metavar="PATH", help=EXTRAS),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a target that is there.")] = False,
    verify: Annotated[
        Check, typer.Option("--verify", help="Check what is read: its blocks, also those read in part, or nothing.")
    ] = Check.yes,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write a checkpoint in another format; the same command goes on from where one was interrupted.

    For transformers: holdfast convert SOURCE TARGET --to huggingface --extras FOLDER_WITH_CONFIG_AND_TOKENIZER
    """
    proved(source, target)
    done = holdfast.convert(
        source, target, to=to.value, only=only_of(only), rename=renames_of(rename), dtype=dtype_of(dtype), step=step,
        max_shard_bytes=bytes_of(shard), extras=extras_of(extras), overwrite=overwrite, verify=_VERIFY[verify],
    )  # fmt: skip
    show(done, as_json=json)


def proved(*paths: str) -> None:
    """Raise ValueError for a path or URL that cannot be meant: to a conversion on many ranks it is a failed save."""
    for path in paths:
        location(path)


def only_of(patterns: list[str] | None) -> str | list[str]:
    """Patterns as functions of the library take them; one alone may name the section of a model."""
    return "*" if not patterns else patterns[0] if len(patterns) == 1 else patterns


def extras_of(given: list[str] | None) -> Extras | None:
    """One folder as it is, several paths as a list."""
    return None if not given else given[0] if len(given) == 1 else list(given)


def show(done: Converted, *, as_json: bool) -> None:
    """What a conversion did."""
    if as_json:
        output.as_json({**{name: getattr(done, name) for name in done.__dataclass_fields__}, "path": str(done.path)})
        return
    output.say(
        f"{done.path} ({done.to}): {len(done.tensors)} tensors, {output.size(done.nbytes)}, {done.seconds:.1f} s"
    )
    pairs = sorted({f"{old} → {new}" for old, new in done.cast.values()})
    told = (
        ("cast to another dtype", len(done.cast), ", ".join(pairs)),
        ("renamed", len(done.renamed), _first(f"{old} → {new}" for old, new in done.renamed.items())),
        ("tied, so stored once", len(done.tied), _first(done.tied)),
        ("not asked for", len(done.skipped), _by_section(done.skipped)),
        (f"left out, as {done.to} has no place for them", len(done.left_out), _by_section(done.left_out)),
        ("put beside", len(done.beside), ", ".join(done.beside[:8]) + (", …" if len(done.beside) > 8 else "")),
    )
    for what, count, which in told:
        if count:
            output.say(f"- {what}: {count} ({which})")
    if done.lacks_config:
        output.say(
            "- no config.json, without which from_pretrained loads nothing: copy it and the tokenizer's files there, "
            "or convert with --extras FOLDER"
        )
    if done.bytes_resumed:
        output.say(f"- there from an earlier call: {output.size(done.bytes_resumed)}")
    if done.bytes_unverified:
        output.say(f"- read without a sum to check by: {output.size(done.bytes_unverified)}")


def _first(names: Iterable[str]) -> str:
    found = list(islice(names, 2))
    return found[0] + (", …" if len(found) > 1 else "") if found else ""


def _by_section(names: list[str]) -> str:
    counts = Counter(name.partition("/")[0] for name in names)
    return ", ".join(f"{section}: {count}" if section not in names else section for section, count in counts.items())
