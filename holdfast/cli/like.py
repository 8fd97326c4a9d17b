"""``holdfast convert --like``: a source in the names and shapes of a model that is there.

`convert` calls it. It reads what describes both checkpoints, and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint import Checkpoint, open_checkpoint, under_map
from holdfast.cli.remaps import named
from holdfast.errors import Mismatch, NotACheckpoint, Unsupported
from holdfast.export.huggingface import bare, section_of
from holdfast.ondisk import names
from holdfast.ondisk.patterns import matcher
from holdfast.storage.urls import location

CONFIG = "config.json"
_SHOWN = 5


def opened_model(folder: str) -> Checkpoint:
    """The model to be like. Raises NotACheckpoint, which tells of a folder without weights what it lacks."""
    try:
        return open_checkpoint(folder)
    except NotACheckpoint as error:
        if not (location(folder) / CONFIG).is_file():
            raise
        raise NotACheckpoint(
            f"{folder} has a config.json and no weights: --like needs a model's weights, for their names and shapes. "
            f"To put the small files beside the source's own names, use --to hf --extras {folder}"
        ) from error


def is_of_hub(model: Checkpoint) -> bool:
    """Whether it is a model as hubs have it, rather than a checkpoint of a training run."""
    return model.format in ("Hugging Face", "safetensors")


def made_like(source: Checkpoint, model: Checkpoint, only: str | list[str], *, mapped: bool) -> Checkpoint:
    """The source, under the map of transformers if it has the names of the live model.

    ``mapped``: a map was given, so no other is tried. Raises Mismatch with what does not fit.
    """
    faults = faults_of(source, model, only)
    if not faults:
        return source
    why = ""
    if not mapped and is_of_hub(model) and CONFIG in model.attachments:
        try:
            under = under_map(source, named("transformers", str(model.path)).inverse())
            if not (others := faults_of(under, model, only)):
                return under
            why, faults = ", nor does it under the map of transformers", min(faults, others, key=_count)
        except (Mismatch, Unsupported, NotACheckpoint, ValueError, OSError) as error:
            why = f", and the map of transformers cannot be used ({error})"
    advice = "the map does not fit: correct it" if mapped else "give a map with --remap MAP"
    raise Mismatch(f"{source.path} does not have the tensors of {model.path}{why}:{_lines(faults)}\n{advice}")


Faults = dict[str, list[str]]
"""Names by what is wrong with them."""


def faults_of(source: Checkpoint, model: Checkpoint, only: str | list[str]) -> Faults:
    """What of the names and shapes is not alike. Either side may lack further names of a tied tensor."""
    has, wanted = _both(source, model, only)
    shapes = [
        f"{name} {list(source.records[has[name]].shape)}, not {list(model.records[full].shape)}"
        for name, full in wanted.items()
        if name in has and source.records[has[name]].shape != model.records[full].shape
    ]
    faults = {
        "the source lacks": _only_in(wanted, has, model),
        "the model lacks": _only_in(has, wanted, source),
        "of another shape": shapes,
    }
    return {what: names for what, names in faults.items() if names}


def _count(faults: Faults) -> int:
    return sum(map(len, faults.values()))


def _lines(faults: Faults) -> str:
    """A line for each kind of fault."""
    more = {what: f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "" for what, names in faults.items()}
    return "".join(f"\n    {what}: {', '.join(names[:_SHOWN])}{more[what]}" for what, names in faults.items())


def names_of(source: Checkpoint, model: Checkpoint, only: str | list[str]) -> str | list[str]:
    """What to convert: what was asked for, or without further names of tied tensors that the model lacks."""
    has, wanted = _both(source, model, only)
    return only if has.keys() <= wanted.keys() else [full for name, full in has.items() if name in wanted]


def _both(source: Checkpoint, model: Checkpoint, only: str | list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Tensors of both by the names that count, each with its name in the checkpoint: of a hub's model its own names."""
    if is_of_hub(model):
        return _model_in(source, only), _model_in(model, "*")
    wanted = matcher(only, known=[*source.records, *model.records])
    has, there = ({name: name for name in checkpoint.records if wanted(name)} for checkpoint in (source, model))
    return has, there


def _model_in(checkpoint: Checkpoint, only: str | list[str]) -> dict[str, str]:
    section = section_of(checkpoint, only)
    own = bare(section)
    return {own(name): name for name in checkpoint.records if names.under(name, section) and name != section}


def _only_in(those: Mapping[str, str], others: Mapping[str, str], checkpoint: Checkpoint) -> list[str]:
    """The names that the others lack, but for those of a tensor that they have under another name."""
    there = {checkpoint.saved_name(full) for name, full in those.items() if name in others}
    return [name for name, full in those.items() if name not in others and checkpoint.saved_name(full) not in there]
