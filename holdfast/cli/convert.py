"""``holdfast convert`` and ``unshard``: write a checkpoint in another format, or its model for inference.

`app` calls them. They never drop a name without saying so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated

import torch
import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.options import Dtype, ExtraFiles, Json, Overwrite, ShardSize, Source
from holdfast.export.huggingface import Extras, section_of
from holdfast.export.work import Converted
from holdfast.ondisk.patterns import TENSOR, selector
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


_VERIFY: dict[Check, Verify] = {Check.yes: True, Check.blocks: "blocks", Check.no: False}
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _dtype_of(text: str | None) -> torch.dtype | None:
    """The dtype of a name, torch's or a usual short one. Raises typer.BadParameter."""
    dtype = None if text is None else getattr(torch, _SHORT.get(text, text), None)
    if text is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise typer.BadParameter(f"--dtype {text} is no floating dtype of torch: bfloat16, float16, float32, float64, …")


def _renames_of(pairs: list[str] | None) -> dict[str, str] | None:
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
        nbytes = float(digits) * units[text.strip().lower()[len(digits) :].strip()]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text} is no size: 512MB, 5GB, 16GiB, …") from None
    if not 1 <= nbytes < 2**63:
        raise typer.BadParameter(f"{text} is no size: at least a byte")
    return int(nbytes)


def convert(
    source: Source,
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
    dtype: Dtype = None,
    step: Annotated[int | None, typer.Option("--step", help="The step to be noted, in holdfast's own format.")] = None,
    shard: ShardSize = "5GB",
    extras: ExtraFiles = None,
    overwrite: Overwrite = False,
    verify: Annotated[
        Check, typer.Option("--verify", help="Check what is read: its blocks, also those read in part, or nothing.")
    ] = Check.yes,
    json: Json = False,
) -> None:
    """Write a checkpoint in another format; the same command goes on from where one was interrupted.

    For transformers: holdfast convert SOURCE TARGET --to huggingface --extras FOLDER_WITH_CONFIG_AND_TOKENIZER
    """
    _check_paths(source, target)
    done = holdfast.convert(
        source, target, to=to.value, only=_only_of(only), rename=_renames_of(rename), dtype=_dtype_of(dtype), step=step,
        max_shard_bytes=bytes_of(shard), extras=_extras_of(extras), overwrite=overwrite, verify=_VERIFY[verify],
    )  # fmt: skip
    output.answer(output.fields(done) | {"path": str(done.path)}, lambda: _show(done), json=json)


def unshard(
    source: Source,
    target: Annotated[str, typer.Argument(help="A file (.pt) for torch.load, or a folder for from_pretrained.")],
    section: Annotated[
        str | None,
        typer.Option("--section", metavar="NAME", help="What the model is called, if not model.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The optimizer and all values too; of a file for torch alone.")
    ] = False,
    dtype: Dtype = None,
    shard: ShardSize = "5GB",
    extras: ExtraFiles = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Gather the weights of a model: a file that torch.load reads, or safetensors that from_pretrained reads.

    The names in it are those of the model: load_state_dict takes what torch.load makes of the file.
    """
    bare = target.partition("?")[0] if "://" in target else target  # without options of a URL
    to = Format.torch if PurePosixPath(bare).suffix in _TORCH_FILES else Format.huggingface
    if everything and to is Format.huggingface:
        raise typer.BadParameter("--all goes with a file for torch (.pt): a folder for inference holds weights alone")
    _check_paths(target)
    opened = holdfast.open(source)
    if section is not None:
        selector(section, opened.records, opened.path, said="--section ", what=TENSOR)
    only = "*" if everything else section_of(opened, section or "*") or "*"
    if not json:
        output.say(f"{opened.path}: {'all of it' if everything else f'the tensors of {only!r}'}")
    done = holdfast.convert(
        opened, target, to=to.value, only=only, dtype=_dtype_of(dtype), max_shard_bytes=bytes_of(shard),
        rename=None if to is Format.huggingface or only == "*" else partial(_without, only),
        extras=_extras_of(extras), overwrite=overwrite,
    )  # fmt: skip
    output.answer(output.fields(done) | {"path": str(done.path)}, lambda: _show(done), json=json)


def _without(section: str, name: str) -> str:
    """A name without the section that it is in."""
    return "" if name == section else name.removeprefix(f"{section}/")


def _check_paths(*paths: str) -> None:
    """Raise ValueError for a path or URL that is none; on many ranks, `holdfast.convert` raises SaveFailed for it."""
    for path in paths:
        location(path)


def _only_of(patterns: list[str] | None) -> str | list[str]:
    """Patterns as functions of the library take them. A single one may name the section of a model."""
    return "*" if not patterns else patterns[0] if len(patterns) == 1 else patterns


def _extras_of(paths: list[str] | None) -> Extras | None:
    """Paths as `holdfast.convert` takes them: a single one as it is, several as a list."""
    return None if not paths else paths[0] if len(paths) == 1 else list(paths)


def _show(done: Converted) -> None:
    """Print what a conversion did."""
    output.say(
        f"{done.path} ({done.to}): {len(done.tensors)} tensors, {output.size(done.nbytes)}, {done.seconds:.1f} s"
    )
    pairs = sorted({f"{old} → {new}" for old, new in done.cast.values()})
    notes = (
        ("cast to another dtype", len(done.cast), ", ".join(pairs)),
        ("renamed", len(done.renamed), _first(f"{old} → {new}" for old, new in done.renamed.items())),
        ("tied, so stored once", len(done.tied), _first(done.tied)),
        ("not asked for", len(done.skipped), _by_section(done.skipped)),
        (f"left out, as {done.to} has no place for them", len(done.left_out), _by_section(done.left_out)),
        ("put beside", len(done.beside), ", ".join(done.beside[:8]) + (", …" if len(done.beside) > 8 else "")),
    )
    for what, count, which in notes:
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
    first = list(islice(names, 2))
    return first[0] + (", …" if len(first) > 1 else "") if first else ""


def _by_section(names: list[str]) -> str:
    counts = Counter(name.partition("/")[0] for name in names)
    return ", ".join(f"{section}: {count}" if section not in names else section for section, count in counts.items())
