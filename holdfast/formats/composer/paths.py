"""Where the files of one Composer save are: a template, a folder with many saves, or one rank's file of several."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import NamedTuple

from holdfast.formats import members
from holdfast.storage.place import Place

_RANKS = ("rank", "local_rank", "node_rank")
_ARCHIVE = r"(?:\.tar(?:\.(?:gz|bz2|xz|lzma|zst))?|\.tgz)"
_SAVE = re.compile(rf"(?:ep|ba|step|batch)\d|rank\d|latest|{_ARCHIVE}$")
"""Names that saves have: Composer's own, and archives of any name."""


class Save(NamedTuple):
    """The files (of shards: the folder) of one save by rank, and its name without ranks."""

    name: str
    files: tuple[Place, ...]


def is_template(path: Place) -> bool:
    """Whether a path has placeholders, such as ``{rank}``."""
    return "{" in str(path)


def matching(template: Place) -> list[Save]:
    """The saves whose files fit a template, the newest first. Placeholders other than those of ranks match anything."""
    first = next(i for i, part in enumerate(template.parts) if "{" in part)
    try:
        parts = [list(Formatter().parse(part)) for part in template.parts[first:]]
    except ValueError:
        return []
    above = template
    for _ in parts:
        above = above.parent
    files_by_name: dict[str, list[tuple[list[int], Place]]] = {}

    def descend(
        folder: Place, rest: list[list[tuple[str, str | None, str | None, str | None]]], name: str, ranks: list[int]
    ) -> None:
        if not rest:
            files_by_name.setdefault(name, []).append((ranks, folder))
            return
        pattern, *rest = rest
        if all(field is None for _, field, _, _ in pattern):
            text = "".join(literal for literal, *_ in pattern)
            if (folder / text).exists():
                descend(folder / text, rest, f"{name}/{text}", ranks)
            return
        expression = re.compile("".join(_expression(*piece) for piece in pattern))
        for entry in _listed(folder):
            if match := expression.fullmatch(entry):
                numbers = [int(n) for n in match.groups()]
                descend(folder / entry, rest, f"{name}/{_without(entry, match)}", ranks + numbers)

    descend(above, parts, "", [])
    saves = [Save(name, tuple(path for _, path in sorted(files))) for name, files in files_by_name.items()]
    return sorted(saves, key=_age)


def _expression(literal: str, field: str | None, spec: str | None, conversion: str | None) -> str:
    if field is None:
        return re.escape(literal)
    return re.escape(literal) + (r"(\d{1,7})" if field in _RANKS else ".+?")


def _without(entry: str, match: re.Match[str]) -> str:
    """A name without the numbers of ranks in it."""
    for group in range(len(match.groups()), 0, -1):
        entry = entry[: match.start(group)] + "*" + entry[match.end(group) :]
    return entry


def saves_in(folder: Place) -> list[Save]:
    """What may be saves in a folder, judged by name: first those that links named `latest` lead to, then the newest."""
    files_by_name: dict[str, list[tuple[int, Place]]] = {}
    for entry in _listed(folder):
        if _SAVE.search(entry) and (folder / entry).exists():
            name, rank = _of_all_ranks(entry)
            files_by_name.setdefault(name, []).append((rank, folder / entry))
    saves = [Save(name, tuple(path for _, path in sorted(files))) for name, files in files_by_name.items()]
    return sorted(saves, key=lambda save: (not save.name.startswith("latest"), *_age(save)))


def siblings(file: Place) -> Save:
    """The files of all ranks of the save to which one rank's file belongs."""
    name, _ = _of_all_ranks(file.name)
    files = sorted(
        (rank, file.parent / entry)
        for entry in _listed(file.parent)
        for other, rank in [_of_all_ranks(entry)]
        if other == name
    )
    return Save(name, tuple(path for _, path in files))


def _of_all_ranks(entry: str) -> tuple[str, int]:
    """A file's name with a star for the rank in it, and the rank (0 if there is none)."""
    numbers = list(re.finditer(r"(?<=rank)[-_]?(\d{1,7})", entry))
    if not numbers:
        return entry, 0
    return f"{entry[: numbers[-1].start(1)]}*{entry[numbers[-1].end(1) :]}", int(numbers[-1][1])


def _age(save: Save) -> tuple[float, ...]:
    """Newer saves first: by the last number in the name (batches follow epochs), then by when they were written."""
    numbers = [int(n) for n in re.findall(r"\d+", re.sub(rf"{_ARCHIVE}$|\.pt\b.*$", "", save.name))]
    return (*(-n for n in numbers[::-1][:1]), *(-n for n in numbers), -save.files[0].modified())


def _listed(folder: Place) -> Iterator[str]:
    if folder.is_dir():
        yield from members.names(folder)
