"""The names that ``only=`` and ``rename=`` mean, and what an error says of a pattern that fits nothing.

Everything that takes patterns calls it. Both arguments mean the names in the checkpoint, before any renaming. The
beginning of a name ends at a ``/``, or, if it is no path of the checkpoint, at a ``.``: ``model/0`` means
``model/0.weight`` too, while ``model`` leaves a section ``model.ema`` alone. Never looks at what a name holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.errors import Mismatch
from holdfast.ondisk.arguments import PATTERNS
from holdfast.ondisk.manifest import Manifest

Patterns = str | Sequence[str]
Rename = Mapping[str, str] | Callable[[str], str]

_END = re.compile(r"([/.])")

TENSOR = "no tensor that"
"""What `selector` says if no tensor fits."""


def patterns_in(only: Patterns, said: str = "only=") -> tuple[str, ...]:
    """The patterns, each once. Raises Mismatch if there is none, or an empty one: that would ask for nothing."""
    PATTERNS.check(said.rstrip("=!"), only)
    patterns = (only,) if isinstance(only, str) else tuple(only or ())
    if not patterns or not all(patterns):
        fault = "has an empty name in it" if any(patterns) else "names nothing"
        raise Mismatch(f'{said}{only!r} {fault}: leave it out to take everything, or give names, such as "model"')
    return tuple(dict.fromkeys(patterns))


def names_in(record: Manifest) -> list[str]:
    """Every name that a checkpoint has, of tensors, values, values that differ by rank, and of lists and the like."""
    return [*record.tensors, *record.aliases, *record.values, *record.per_rank, *record.containers]


def matcher(
    only: Patterns, said: str = "only=", known: Iterable[str] | None = None
) -> Callable[[str], bool]:  # fmt: skip
    """A function that says whether a name is a pattern, lies below it, or fits it as a glob (``*`` crosses ``/``).

    ``known``: the names of the checkpoint. Without them only a ``/`` ends a beginning.
    """
    patterns = patterns_in(only, said)
    if "*" in patterns:
        return lambda name: True
    paths, globs = _paths(patterns), [pattern for pattern in patterns if _is_glob(pattern)]
    beginnings = () if known is None else tuple(_dotted(patterns, _all_paths(known)).values())
    return lambda name: (
        any(at in paths for at in _upwards(name))
        or name.startswith(beginnings)
        or any(fnmatchcase(name, glob) for glob in globs)
    )


def unfit(only: Patterns, known: Collection[str]) -> list[str]:
    """The patterns that fit none of the ``known`` names. ``*`` takes all that there is, also of nothing."""
    odd = _begin_nothing([text for text in patterns_in(only) if text != "*"], known)
    return [text for text in odd if not (_is_glob(text) and any(fnmatchcase(name, text) for name in known))]


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
        new = renamer(rename, known)
        renamed = {} if rename is None else {name: new(name) for name in known}
        raise Mismatch(f"{where} has {what} fits {said}{quoted(odd, known, renamed=renamed)}")
    return matcher(patterns, known=known)


def quoted(
    patterns: Iterable[str], known: Collection[str], *, renamed: Mapping[str, str] | None = None
) -> str:  # fmt: skip
    """Patterns that fit nothing, each with a near name if there is one.

    ``renamed``: the new name of each saved one, if there is a ``rename=``: a pattern may be meant for new names.
    """
    return ", ".join(repr(pattern) + _hint(pattern, known, renamed or {}) for pattern in patterns)


def _hint(pattern: str, known: Collection[str], renamed: Mapping[str, str]) -> str:
    if pattern.startswith("!"):
        return " (it cannot say what is left out: name what is wanted)"
    if renamed:
        fits = matcher(pattern, known=renamed.values())
        for saved, new in renamed.items():
            if new != saved and fits(new):
                return f" (only= takes names as they were saved, and {new} was saved as {saved})"
    stem = pattern.rstrip("*?").rstrip("/.") or pattern
    ends = len(_END.findall(stem))
    heads = dict.fromkeys(_head(name, ends) for name in known)
    hint = did_you_mean(_in_another_section(stem, known)) or near(stem, heads) or near(stem, list(known))
    first = stem.split("/", 1)[0]
    firsts = dict.fromkeys(name.split("/", 1)[0] for name in known)
    return hint if hint or first in firsts else near(first, firsts)


def _in_another_section(stem: str, known: Collection[str]) -> str | None:
    """What begins a known name and is the stem but for a section before it, which one has and the other lacks."""
    inner = _END.split(stem, maxsplit=1)[-1]
    for name in known:
        section, _, rest = name.partition("/")
        if _begins(stem, rest):
            return f"{section}/{stem}"
        if inner != stem and _begins(inner, name):
            return inner
    return None


def _begins(stem: str, name: str) -> bool:
    return bool(stem) and (name == stem or name.startswith((f"{stem}/", f"{stem}.")))


def _head(name: str, ends: int) -> str:
    """The beginning of a name that has so many ends of beginnings in it."""
    return "".join(_END.split(name)[: 2 * ends + 1])


def near(name: str, known: Collection[str]) -> str:
    """`` (did you mean …?)`` for a name that is close to a known one, else nothing."""
    from difflib import get_close_matches

    last = name.rpartition("/")[2]
    candidates = [k for k in known if k.rpartition("/")[2] == last or len(known) <= 2000]
    close = get_close_matches(name, candidates[:2000], n=1, cutoff=0.7)
    return did_you_mean(close[0] if close else None)


def did_you_mean(name: str | None) -> str:
    """`` (did you mean …?)``, or nothing for None."""
    return "" if name is None else f" (did you mean {name}?)"


def closest(name: str, known: Sequence[str]) -> str | None:
    """The known name, of the first few hundred, that is most like a name, the first of several; None if none is."""
    from difflib import SequenceMatcher

    best, most = None, 0.7
    matching = SequenceMatcher(b=name, autojunk=False)
    for other in known[:300]:
        matching.set_seq1(other)
        if matching.real_quick_ratio() >= most and matching.quick_ratio() >= most:
            ratio = matching.ratio()
            if ratio > most or (best is None and ratio == most):
                best, most = other, ratio
    return best


def _paths(patterns: Iterable[str]) -> set[str]:
    return {pattern.rstrip("/") for pattern in patterns} - {""}


def _is_glob(pattern: str) -> bool:
    return not set("*?[").isdisjoint(pattern)


def _upwards(name: str) -> Iterator[str]:
    """A name, and every path above it."""
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _all_paths(known: Iterable[str]) -> set[str]:
    return {at for name in known for at in _upwards(name)}


def _dotted(beginnings: Iterable[str], paths: Collection[str]) -> dict[str, str]:
    """Those that may end at a ``.``, as they are none of the ``paths`` of a checkpoint: each with the ``.`` behind it.

    What ends with ``/`` says that it is a path.
    """
    return {text: text.removesuffix(".") + "." for text in beginnings if not (text.endswith("/") or text in paths)}


def _begin_nothing(beginnings: Iterable[str], known: Collection[str]) -> list[str]:
    """Those that are none of the ``known`` names, and begin none."""
    paths = _all_paths(known)
    odd = [text for text in beginnings if text.rstrip("/") not in paths]
    dotted = _dotted(odd, paths)
    return [text for text in odd if not (text in dotted and any(name.startswith(dotted[text]) for name in known))]


# New names


@dataclass(frozen=True)
class _Row:
    """What a table says of one name: its new one, and that of what begins with ``start``."""

    old: str
    start: str
    new: str
    new_start: str

    def __call__(self, name: str) -> str | None:
        if name == self.old:
            return self.new
        return self.new_start + name[len(self.start) :] if name.startswith(self.start) else None

    @property
    def back(self) -> _Row:
        """From new names to old ones."""
        return _Row(self.new, self.new_start, self.old, self.start)


def renamer(rename: Rename | None, known: Iterable[str] = ()) -> Callable[[str], str]:
    """A table (of names, or of beginnings of the ``known`` ones) or a function as a function."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    table = _table(rename, known)
    return lambda name: _by(table, name)


def _by(table: Sequence[_Row], name: str) -> str:
    return next((new for row in table if (new := row(name)) is not None), name)


def _table(rename: Mapping[str, str], known: Iterable[str]) -> list[_Row]:
    """The rows of a table; the longest beginning, which comes first, is the one that counts."""
    rows = [_row(old, old.rstrip("/") + "/", new) for old, new in rename.items()]
    rows += [_row(old, start, rename[old]) for old, start in _dotted(rename, _all_paths(known)).items()]
    return sorted(rows, key=lambda row: -len(row.start))


def _row(old: str, start: str, new: str) -> _Row:
    """One row. If both sides end with ``/`` or ``.``, the end is replaced too; otherwise that of the name stays."""
    if old.endswith(start[-1]) and new.endswith(("/", ".")):
        new_start = new.rstrip("/") + "/" if new.endswith("/") else new
        return _Row(old.rstrip("/"), start, new_start[:-1], new_start)
    bare = new.rstrip("/") if start.endswith("/") else new.rstrip("/").removesuffix(".")
    return _Row(old.rstrip("/"), start, bare, bare and bare + start[-1])


def check_rename(rename: Rename | None, known: Sequence[str], where: object) -> None:
    """Raise Mismatch if a table renames what none of the ``known`` names of ``where`` is, or lies below."""
    if rename is None or callable(rename):
        return
    if odd := _begin_nothing(rename, known):
        example = f": the names are as in {known[0]!r}" if known else ""
        raise Mismatch(f"rename= maps {quoted(odd, known)}, but no name of {where} is that or lies below it{example}")


def asked_in_target(only: Patterns, rename: Rename | None, renamed: Mapping[str, str]) -> Callable[[str], bool]:
    """A function that says whether a name of a load's target is asked for: whether its saved name fits ``only``.

    ``renamed``: the target's name of each saved one. What nothing is saved of goes by the name that it would have been
    saved under. A function cannot be asked for that: with one such a name counts as asked for, and is missed then.
    """
    if only == "*":
        return lambda own: True
    fits = matcher(only, known=renamed)
    fitting = {own: fits(saved) for saved, own in renamed.items()}
    if callable(rename):
        for own, is_asked in list(fitting.items()):
            for path in _upwards(own):
                fitting[path] = fitting.get(path, False) or is_asked
        return lambda own: fitting.get(own, True)
    table = _table(rename or {}, renamed)
    return lambda own: fitting[own] if own in fitting else any(map(fits, _saved_as(own, table)))


def unfit_in_load(
    only: Patterns, rename: Rename | None, renamed: Mapping[str, str], own: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Of the patterns that fit nothing saved: those that fit nothing here either, as errors quote them; and the others.

    ``own``: names of the target. A pattern may fit one of which nothing is saved, and which is missed then.
    """
    odd = unfit(only, renamed)
    if not odd:
        return {}, []
    there = _all_paths(renamed.values())
    table = [] if callable(rename) else _table(rename or {}, renamed)
    alone = [] if callable(rename) else [x for name in own if name not in there for x in _saved_as(name, table)]
    nowhere = unfit(odd, alone)
    return {p: quoted([p], renamed, renamed=renamed) for p in nowhere}, [p for p in odd if p not in nowhere]


def _saved_as(own: str, table: Sequence[_Row]) -> list[str]:
    """The saved names that a table would give this name."""
    candidates = [saved for row in table if row.new_start and (saved := row.back(own)) is not None]
    candidates = candidates or [own, *(row.start + own for row in table if not row.new_start)]
    return [saved for saved in candidates if _by(table, saved) == own] or [own]
