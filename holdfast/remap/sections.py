"""A map applied to all that a checkpoint holds of a model: its weights, and what an optimizer has of each of them.

`Remapped` calls it. Rules speak of a model's own names (FQNs): what stands before them, as in ``model/``, is no part of
them. Reads nothing but the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Mismatch
from holdfast.ondisk import names
from holdfast.ondisk.manifest import Manifest
from holdfast.remap.nodes import Filled, Node, Saved, described, saved_in
from holdfast.remap.remap import Remap
from holdfast.remap.rule import Names

_GROUPS = "param_groups"

Differ = Callable[[Sequence[tuple[str, ...]]], str | None]
"""Given names of tensors that would become one, why some cannot; None if all can."""


@dataclass(frozen=True)
class Section:
    """Tensors of a checkpoint that have the names of a model's parameters between the same two texts.

    ``prefix`` and ``suffix``: ``"model/"`` and nothing, or ``"optim/state/"`` and ``"/exp_avg"``. ``optimizer``: the
    path of the optimizer that they are the moments of.
    """

    prefix: str
    suffix: str
    optimizer: str | None
    tensors: dict[str, Saved]

    def full(self, fqn: str) -> str:
        """The name in the checkpoint."""
        return f"{self.prefix}{fqn}{self.suffix}"


@dataclass(frozen=True)
class Mapped:
    """A checkpoint's tensors and values, as a map makes them.

    ``alike``: names of small tensors, such as the steps of parameters, that become one. They have to be equal.
    ``left_out``: optimizers that cannot follow the map, by path, with the reason.
    """

    tensors: dict[str, Node]
    values: dict[str, Any]
    alike: tuple[tuple[str, ...], ...]
    left_out: dict[str, str]


def mapped(manifest: Manifest, remap: Remap, where: object, differ: Differ = lambda alike: None) -> Mapped:
    """What a map makes of a checkpoint. Raises Mismatch for a model that does not fit.

    An optimizer that cannot follow is left out, so that the model can be had without it. ``differ`` says why tensors
    that would become one cannot, if they are not equal.
    """
    sections = sections_of(manifest)
    tensors: dict[str, Node] = {}
    values = dict(manifest.values)
    alike: list[tuple[str, ...]] = []
    left_out: dict[str, str] = {}
    models: dict[str, Names] = {}
    for section in sections:
        if section.optimizer is None:
            models[section.prefix] = remap.resolve(section.tensors)
    whole = {section.prefix: section.tensors for section in sections if section.optimizer is None}
    changed = [prefix for prefix, made in models.items() if _is_changed(made, whole[prefix])]
    if changed:  # no constants for what no other rule is about
        models.update((prefix, dict(tensors)) for prefix, tensors in whole.items() if prefix not in changed)
    for section in sections:
        if section.optimizer is None:
            made = models[section.prefix]
            _check_names(made, section, where)
            tensors.update((section.full(fqn), node) for fqn, node in made.items())
    for optimizer in _optimizers(manifest):
        try:
            moments, small = _state_of(optimizer, sections, remap)
            followed = _with_groups(values, optimizer, models, sections)
            why = differ(small)
        except Mismatch as error:
            why = str(error)
        if why is None:
            tensors, values = tensors | moments, followed
            alike += small
        else:
            left_out[optimizer] = why
            values = {name: value for name, value in values.items() if not name.startswith(f"{optimizer}/")}
            tensors = {name: node for name, node in tensors.items() if not name.startswith(f"{optimizer}/")}
    return Mapped(tensors, values, tuple(alike), left_out)


def _state_of(
    optimizer: str, sections: Sequence[Section], remap: Remap
) -> tuple[dict[str, Node], list[tuple[str, ...]]]:  # fmt: skip
    """The moments of an optimizer, as the map makes them, and names of small tensors that become one."""
    moments: dict[str, Node] = {}
    alike: list[tuple[str, ...]] = []
    for section in (one for one in sections if one.optimizer == optimizer):
        model = _model_of(section, sections)
        if model is None:
            raise Mismatch(
                f"the map cannot be applied to {section.prefix}*{section.suffix}, as no model in the checkpoint has "
                "parameters of these names"
            )
        moments.update(_moments(section, model, remap, alike))
    return moments, alike


def _is_changed(made: Names, tensors: Mapping[str, Saved]) -> bool:
    """Whether rules did more to tensors than to add some of one number."""
    return {name: node for name, node in made.items() if not isinstance(node, Filled)} != tensors


def _check_names(made: Iterable[str], section: Section, where: object) -> None:
    """Raise Mismatch for what cannot be a model's own name of a tensor."""
    for fqn in made:
        if fqn not in section.tensors and (not fqn or names.escape(names.unescape(fqn)) != fqn):
            raise Mismatch(
                f"{where}: the map makes the name {fqn!r}, in which a slash, a bracket or a like character has to be "
                f"written as {names.escape(names.unescape(fqn))!r}"
            )


def sections_of(manifest: Manifest) -> list[Section]:
    """The sections of a checkpoint, in its order."""
    states = [(path, f"{path}/state/") for path in _optimizers(manifest)]
    sections: dict[tuple[str, str], Section] = {}
    everything = [*((name, name) for name in manifest.tensors), *manifest.aliases.items()]
    for name, stored in everything:
        record = manifest.tensors[stored]
        owner = next((path for path, above in states if name.startswith(above)), None) if states else None
        if owner is None:
            prefix, slash, fqn = name.rpartition("/")
            key = (prefix + slash, "")
        else:
            rest, slash, moment = name[len(f"{owner}/state/") :].rpartition("/")
            key, fqn = (f"{owner}/state/", slash + moment), rest
        section = sections.setdefault(key, Section(*key, owner, {}))
        section.tensors[fqn] = Saved(stored, record.dtype, record.shape)
    return list(sections.values())


def _optimizers(manifest: Manifest) -> list[str]:
    """The paths of optimizers: what has parameter groups."""
    ends = (name.rpartition("/") for name in manifest.containers)
    return [path for path, _, last in ends if last == _GROUPS]


def _model_of(section: Section, sections: Iterable[Section]) -> Section | None:
    """The model whose parameters an optimizer's state is of; None if there is none."""
    best = max(
        (one for one in sections if one.optimizer is None),
        key=lambda one: len(one.tensors.keys() & section.tensors.keys()), default=None,
    )  # fmt: skip
    return best if best is not None and best.tensors.keys() & section.tensors.keys() else None


def _moments(section: Section, model: Section, remap: Remap, alike: list[tuple[str, ...]]) -> dict[str, Node]:
    """The moments of the parameters that a map makes."""
    laid_out = {
        fqn: saved
        for fqn, saved in section.tensors.items()
        if fqn in model.tensors and saved.shape == model.tensors[fqn].shape
    }
    made = {section.full(fqn): node for fqn, node in remap.resolve(laid_out, moments=True).items()}
    rest = {fqn: saved for fqn, saved in section.tensors.items() if fqn not in laid_out}
    if not rest:
        return made
    weights = remap.resolve(model.tensors, moments=True)
    for target, fqns in _origins(model.tensors, weights).items():
        theirs = [rest[fqn] for fqn in fqns if fqn in rest]
        if not theirs:
            continue
        if not (isinstance(weights[target], Saved) or all(saved.shape in ((), (1,)) for saved in theirs)):
            raise Mismatch(
                f"{described(theirs[0])} is not laid out like its parameter, so it cannot follow the map to {target}"
            )
        made[section.full(target)] = theirs[0]
        alike.append(tuple(saved.name for saved in theirs))
    return made


def _with_groups(
    values: dict[str, Any], optimizer: str, models: Mapping[str, Names], sections: Iterable[Section]
) -> dict[str, Any]:  # fmt: skip
    """The values, with the target's names of parameters in an optimizer's groups and of what it keeps of each."""
    groups, state = f"{optimizer}/{_GROUPS}/", f"{optimizer}/state/"
    of_group: dict[str, str] = {}
    for path, value in values.items():
        if path.startswith(groups) and isinstance(value, str):
            number, _, rest = path[len(groups) :].partition("/")
            if rest.startswith("params/"):
                of_group[value] = number
    if not of_group:
        return values
    prefix = max(models, key=lambda one: len(_fqns(one, sections).keys() & of_group.keys()))
    targets: dict[str, list[str]] = {}
    origins = _origins(_fqns(prefix, sections), models[prefix])
    for target, fqns in origins.items():
        numbers = {of_group[fqn] for fqn in fqns if fqn in of_group}
        if len(numbers) > 1:
            raise Mismatch(f"{target} is made of parameters in several groups of {optimizer}: {', '.join(fqns)}")
        for number in numbers:
            targets.setdefault(number, []).append(target)
    below: dict[str, dict[str, Any]] = {}
    kept: dict[str, Any] = {}
    for path, value in values.items():
        number, _, rest = path[len(groups) :].partition("/") if path.startswith(groups) else ("", "", "")
        if rest.startswith("params/"):
            if rest == "params/0":
                kept.update((f"{groups}{number}/params/{i}", fqn) for i, fqn in enumerate(targets.get(number, ())))
        elif path.startswith(state):
            fqn, _, rest = path[len(state) :].partition("/")
            below.setdefault(fqn, {})[rest] = value
        else:
            kept[path] = value
    for target, fqns in origins.items():
        first = next((below[fqn] for fqn in fqns if fqn in below), {})
        kept.update((f"{state}{target}/{rest}", value) for rest, value in first.items())
    return kept


def _origins(source: Mapping[str, Saved], made: Names) -> dict[str, list[str]]:
    """The parameters that each tensor of a target comes from; of a tied one every name."""
    fqns: dict[str, list[str]] = {}
    for fqn, saved in source.items():
        fqns.setdefault(saved.name, []).append(fqn)
    return {
        target: list(dict.fromkeys(fqn for saved in saved_in(node) for fqn in fqns[saved.name]))
        for target, node in made.items()
    }


def _fqns(prefix: str, sections: Iterable[Section]) -> dict[str, Saved]:
    return next(one.tensors for one in sections if one.optimizer is None and one.prefix == prefix)
