"""``holdfast convert``: write a checkpoint in another format, or its model alone for inference.

`commands` calls it. It never drops a name without saying so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import torch
import typer

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.cli import output
from holdfast.cli.commands import Check, Format
from holdfast.cli.like import is_of_hub, made_like, names_of, opened_model
from holdfast.cli.options import bytes_of
from holdfast.cli.remaps import map_of, show_proof
from holdfast.export.huggingface import Extras, by_name, section_of
from holdfast.export.work import Converted, floating, format_named
from holdfast.ondisk.patterns import TENSOR, selector
from holdfast.read.ranges import Verify
from holdfast.remap.proof import Proof
from holdfast.remap.remapped import Remapped
from holdfast.storage.urls import location

_VERIFY: dict[Check, Verify] = {Check.yes: True, Check.blocks: "blocks", Check.no: False}
_BY_SUFFIX = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), Format.torch) | {".safetensors": Format.huggingface}


def convert(
    *, source: str, target: str, more: list[str] | None, to: Format | None, model_only: bool, only: list[str] | None,
    rename: list[str] | None, remap: str | None, like: str | None, dtype: str | None, step: int | None, shard: str,
    extras: list[str] | None, overwrite: bool, verify: Check, merge: bool, weights: str | None, decay: float | None,
    base: str | None, slerp: float | None, json: bool,
) -> None:  # fmt: skip
    paths = [source, target, *(more or [])]
    sources, target = paths[:-1], paths[-1]
    for path in paths:
        location(path)  # ValueError for what is neither a path nor a URL; the conversion itself raises SaveFailed
    if not merge and (more or weights or base or decay is not None or slerp is not None):
        raise typer.BadParameter("more than one source, --weights, --decay, --base and --slerp go with --merge")
    if merge and (remap or like):
        raise typer.BadParameter("--remap and --like take one source: merge first, and convert what comes of it")
    if like and rename:
        raise typer.BadParameter("--like says what the tensors are called: leave out --rename")
    opened = holdfast.open(sources[-1], remap=map_of(remap))
    if opened.reading and not json:
        output.say(f"{opened.path} is read as: {opened.reading}")
    names: str | list[str] = "*" if not only else only[0] if len(only) == 1 else only
    renames: Callable[[str], str] | dict[str, str] | None = _renames_of(rename)
    model = opened_model(like) if like else None
    for_hub = model_only or (model is not None and is_of_hub(model))
    wanted = format_named((to or _format_of(target, Format.hf if for_hub else Format.holdfast)).value)
    small: Extras | None = extras or None
    if model is not None:
        opened = made_like(opened, model, names, mapped=remap is not None)
        names = names_of(opened, model, names)
        if wanted == "huggingface":
            small = {name: model.attachment(name) for name in model.attachments} | by_name(small)
    elif model_only:
        if rename or not isinstance(names, str):
            raise typer.BadParameter(
                "--model-only gives the tensors their names: it goes with one --only and no --rename"
            )
        names = _section_of(opened, names)
        if not json:
            output.say(f"{opened.path}: the tensors of {names!r}")
        renames = None if wanted == "huggingface" or names == "*" else partial(_without, names)
    how: dict[str, Any] = {
        "to": wanted, "rename": renames, "dtype": _dtype_of(dtype), "step": step, "max_shard_bytes": bytes_of(shard),
        "extras": small, "overwrite": overwrite, "verify": _VERIFY[verify],
    }  # fmt: skip
    if merge:
        sums = _sums(len(sources), weights, decay, base, slerp)
        asked = names if only or model_only else None
        done = holdfast.tools.merge([*sources[:-1], opened], target, only=asked, **sums, **how)
    else:
        done = holdfast.convert(opened, target, only=names, **how)
    proof = opened.reader.proof() if isinstance(opened.reader, Remapped) else None
    fields = output.fields(done) | {"path": str(done.path)} | ({} if proof is None else {"map": proof})
    output.answer(fields, lambda: _show(done, proof), json=json)


def _sums(
    count: int, weights: str | None, decay: float | None, base: str | None, slerp: float | None
) -> dict[str, Any]:  # fmt: skip
    """What a merge is to do, as arguments. Raises typer.BadParameter."""
    if slerp is not None:
        if count != 2 or weights or base or decay is not None:
            raise typer.BadParameter("--slerp takes two sources, and neither --weights nor --decay nor --base")
        return {"method": "slerp", "t": slerp}
    try:
        numbers = [float(weight) for weight in weights.split(",")] if weights else None
    except ValueError:
        raise typer.BadParameter(f"--weights {weights} are not numbers with commas between them") from None
    return {"weights": numbers, "decay": decay, "base": base}


def _format_of(target: str, otherwise: Format) -> Format:
    """The format that the suffix of a target names."""
    path = target.partition("?")[0] if "://" in target else target  # without the options of a URL
    return _BY_SUFFIX.get(PurePosixPath(path).suffix, otherwise)


def _section_of(checkpoint: Checkpoint, name: str) -> str:
    """The names of the model: ``name`` if one is given, else the section `model`, or all there is."""
    selector(name, checkpoint.records, checkpoint.path, what=TENSOR)  # raises Mismatch, with a near name
    return section_of(checkpoint, name) or "*"


def _without(section: str, name: str) -> str:
    """A name without the section that it is in."""
    return "" if name == section else name.removeprefix(f"{section}/")


def _dtype_of(text: str | None) -> torch.dtype | None:
    """The dtype of a name, torch's or a usual short one. Raises typer.BadParameter."""
    with suppress(ValueError):
        return floating(text)
    raise typer.BadParameter(f"--dtype {text} is not a floating dtype of torch: bfloat16, float16, float32, …")


def _renames_of(pairs: list[str] | None) -> dict[str, str] | None:
    """``OLD=NEW`` as a table. Raises typer.BadParameter."""
    for pair in pairs or ():
        if "=" not in pair:
            raise typer.BadParameter(f"--rename {pair} is not OLD=NEW")
    return {old: new for old, _, new in (pair.partition("=") for pair in pairs)} if pairs else None


def _show(done: Converted, proof: Proof | None) -> None:
    """Print what a conversion did."""
    output.say(
        f"{done.path} ({done.to}): {output.count(len(done.tensors), 'tensor')}, "
        f"{output.size(done.nbytes)}, {done.seconds:.1f} s"
    )
    pairs = sorted({f"{old} → {new}" for old, new in done.cast.values()})
    notes = (
        ("cast to another dtype", len(done.cast), ", ".join(pairs)),
        ("renamed", len(done.renamed), _first(f"{old} → {new}" for old, new in done.renamed.items())),
        ("tied, so stored once", len(done.tied), _first(done.tied)),
        ("not asked for", len(done.skipped), _by_section(done.skipped)),
        (f"left out, as {done.to} has no place for them", len(done.left_out), _by_section(done.left_out)),
        ("not summed", len(done.not_summed), _first(done.not_summed)),
        ("put beside", len(done.beside), ", ".join(done.beside[:8]) + (", …" if len(done.beside) > 8 else "")),
    )
    for what, count, which in notes:
        if count:
            output.say(f"- {what}: {count} ({which})")
    if proof is not None:
        show_proof(proof, "- ")
    if done.lacks_config:
        output.say(
            "- no config.json, without which from_pretrained loads nothing: copy it and the tokenizer's files there, "
            "or convert with --extras FOLDER"
        )
    if done.bytes_resumed:
        output.say(f"- there from an earlier call: {output.size(done.bytes_resumed)}")
    if done.bytes_unverified:
        output.say(f"- not verified, since the source has no checksum of it: {output.size(done.bytes_unverified)}")


def _first(names: Iterable[str]) -> str:
    first = list(islice(names, 2))
    return first[0] + (", …" if len(first) > 1 else "") if first else ""


def _by_section(names: list[str]) -> str:
    counts = Counter(name.partition("/")[0] for name in names)
    return ", ".join(f"{section}: {count}" if section not in names else section for section, count in counts.items())
