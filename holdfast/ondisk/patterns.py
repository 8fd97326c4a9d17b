"""The names that ``only=`` and ``rename=`` mean, and what an error says of a pattern that fits nothing.

Everything that takes patterns calls it. Both arguments mean the names in the checkpoint, before any renaming.
Never looks at what a name holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from holdfast.errors import Mismatch
from holdfast.ondisk import names
from holdfast.ondisk.manifest import Manifest

Patterns = str | Sequence[str]
Rename = Mapping[str, str] | Callable[[str], str]

TENSOR = "no tensor that"
"""What `selector` says if no tensor fits."""


def patterns_in(only: Patterns, said: str = "only=") -> tuple[str, ...]:
    """The patterns, each once. Raises Mismatch if there is none, or an empty one: that would ask for nothing."""
    patterns = (only,) if isinstance(only, str) else tuple(only or ())
    if not patterns or not all(patterns):
        fault = "has an empty name in it" if any(patterns) else "names nothing"
        raise Mismatch(f'{said}{only!r} {fault}: leave it out to take everything, or give names, such as "model"')
    return tuple(dict.fromkeys(patterns))


def names_in(record: Manifest) -> list[str]:
    """Every name that a checkpoint has, of tensors, values, values that differ by rank, and of lists and the like."""
    return [*record.tensors, *record.aliases, *record.values, *record.per_rank, *record.containers]


def matcher(only: Patterns, said: str = "only=") -> Callable[[str], bool]:
    """A function that says whether a name is a pattern, lies below it, or fits it as a glob (``*`` crosses ``/``)."""
    patterns = patterns_in(only, said)
    if "*" in patterns:
        return lambda name: True
    paths, globs = _paths(patterns), [pattern for pattern in patterns if _is_glob(pattern)]
    return lambda name: any(at in paths for at in _upwards(name)) or any(fnmatchcase(name, glob) for glob in globs)


def unfit(only: Patterns, known: Collection[str]) -> list[str]:
    """The patterns that fit none of the ``known`` names."""
    paths = {at for name in known for at in _upwards(name)}
    return [
        pattern
        for pattern in patterns_in(only)
        if pattern != "*"
        and pattern.rstrip("/") not in paths
        and not (_is_glob(pattern) and any(fnmatchcase(name, pattern) for name in known))
    ]


def selector(
    only: Patterns, known: Collection[str], where: object, *, said: str = "only=", what: str = "nothing that",
    rename: Rename | None = None,
) -> Callable[[str], bool]:  # fmt: skip
    """A `matcher`, if each pattern fits a ``known`` name of ``where``; else raises Mismatch with those that do not.

    ``said``: how the caller's argument is written. ``what``: what would fit. ``rename``: what becomes of the names.
    """
    if only == "*":
        return lambda name: True
    patterns = patterns_in(only, said)
    if odd := unfit(patterns, known):
        renamed = {} if rename is None else {name: renamer(rename)(name) for name in known}
        raise Mismatch(f"{where} has {what} fits {said}{quoted(odd, known, renamed=renamed)}")
    return matcher(patterns)


def quoted(
    patterns: Iterable[str], known: Collection[str], *, separator: str = "/", renamed: Mapping[str, str] | None = None
) -> str:  # fmt: skip
    """Patterns that fit nothing, each with a near name if there is one.

    ``renamed``: the new name of each saved one, if there is a ``rename=``: a pattern may be meant for new names.
    """
    return ", ".join(repr(pattern) + _hint(pattern, known, separator, renamed or {}) for pattern in patterns)


def _hint(pattern: str, known: Collection[str], separator: str, renamed: Mapping[str, str]) -> str:
    if pattern.startswith("!"):
        return " (it cannot say what is left out: name what is wanted)"
    if renamed:
        fits = matcher(pattern)
        for saved, new in renamed.items():
            if new != saved and fits(new):
                return f" (only= takes names as they were saved, and {new} was saved as {saved})"
    stem = pattern.rstrip("*?").rstrip("/.") or pattern
    parts = stem.count(separator) + 1
    heads = dict.fromkeys(separator.join(name.split(separator, parts)[:parts]) for name in known)
    hint = near(stem, heads) or near(stem, list(known))
    first = stem.split(separator, 1)[0]
    firsts = dict.fromkeys(name.split(separator, 1)[0] for name in known)
    return hint if hint or first in firsts else near(first, firsts)


def near(name: str, known: Collection[str]) -> str:
    """`` (did you mean …?)`` for a name that is close to a known one, else nothing."""
    from difflib import get_close_matches

    last = name.rpartition("/")[2]
    candidates = [k for k in known if k.rpartition("/")[2] == last or len(known) <= 2000]
    close = get_close_matches(name, candidates[:2000], n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def _paths(patterns: Iterable[str]) -> set[str]:
    return {pattern.rstrip("/") for pattern in patterns} - {""}


def _is_glob(pattern: str) -> bool:
    return not set("*?[").isdisjoint(pattern)


def _upwards(name: str, separator: str = "/") -> Iterator[str]:
    """A name, and every path above it."""
    yield name
    while separator in name:
        name = name.rpartition(separator)[0]
        yield name


# New names


def renamer(rename: Rename | None, separator: str = "/") -> Callable[[str], str]:
    """A table (of names, or of leading paths) or a function as a function."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    table = _table(rename, separator)

    def renamed(name: str) -> str:
        for old, new in table:
            if name == old or name.startswith(old + separator):
                rest = name[len(old) :]
                return new + rest if new else rest.removeprefix(separator)
        return name

    return renamed


def _table(rename: Mapping[str, str], separator: str) -> list[tuple[str, str]]:
    """Old and new paths; the longest old one, which comes first, is the one that counts."""
    return sorted(((a.rstrip(separator), b.rstrip(separator)) for a, b in rename.items()), key=lambda x: -len(x[0]))


def check_rename(rename: Rename | None, known: Sequence[str], where: object, *, separator: str = "/") -> None:
    """Raise Mismatch if a table renames what none of the ``known`` names of ``where`` is, or lies below."""
    if rename is None or callable(rename):
        return
    paths = {at for name in known for at in _upwards(name, separator)}
    if odd := [old for old in rename if old.rstrip(separator) not in paths]:
        example = f": the names are as in {known[0]!r}" if known else ""
        raise Mismatch(
            f"rename= maps {quoted(odd, known, separator=separator)}, but no name of {where} is that or lies below it"
            f"{example}"
        )


def asked_in_target(only: Patterns, rename: Rename | None, renamed: Mapping[str, str]) -> Callable[[str], bool]:
    """A function that says whether a name of a load's target is asked for: whether its saved name fits ``only``.

    ``renamed``: the target's name of each saved one. What nothing is saved of goes by the name that it would have been
    saved under. A function cannot be asked for that: with one such a name counts as asked for, and is missed then.
    """
    if only == "*":
        return lambda own: True
    fits = matcher(only)
    fitting = {own: fits(saved) for saved, own in renamed.items()}
    if callable(rename):
        for own, is_asked in list(fitting.items()):
            for path in _upwards(own):
                fitting[path] = fitting.get(path, False) or is_asked
        return lambda own: fitting.get(own, True)
    return lambda own: fitting[own] if own in fitting else any(map(fits, _saved_as(own, rename)))


def unfit_in_load(
    only: Patterns, rename: Rename | None, renamed: Mapping[str, str], own: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Of the patterns that fit nothing saved: those that fit nothing here either, as errors quote them; and the others.

    ``own``: names of the target. A pattern may fit one of which nothing is saved, and which is missed then.
    """
    odd = unfit(only, renamed)
    if not odd:
        return {}, []
    there = {at for name in renamed.values() for at in _upwards(name)}
    alone = [] if callable(rename) else [x for name in own if name not in there for x in _saved_as(name, rename)]
    nowhere = unfit(odd, alone)
    return {p: quoted([p], renamed, renamed=renamed) for p in nowhere}, [p for p in odd if p not in nowhere]


def _saved_as(own: str, rename: Mapping[str, str] | None) -> list[str]:
    """The saved names that a table would give this name."""
    if not rename:
        return [own]
    called, table = renamer(rename), _table(rename, "/")
    candidates = [old + own[len(new) :] for old, new in table if new and names.under(own, new)]
    candidates = candidates or [own, *(f"{old}/{own}" for old, new in table if not new)]
    return [saved for saved in candidates if called(saved) == own] or [own]
