"""Files of `torch.save`, each what one rank saved, with DTensors or ShardedTensors in them: all ranks joined.

`detect` calls `read` before the reader of single files. Numbers in names alone do not make files those of ranks.
"""

from __future__ import annotations

import re

from holdfast.errors import Damaged
from holdfast.formats import members, recognise
from holdfast.formats.ahead import glanced
from holdfast.formats.assemble import Found
from holdfast.formats.items import prove_joined
from holdfast.formats.machine.all_ranks import prove_all
from holdfast.formats.machine.torch_files import is_torch_file, load_path
from holdfast.formats.sharded import has_shards, join_ranks
from holdfast.formats.sources import all_of, file
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place

RANK = "{rank}"

_NUMBER = re.compile(r"[0-9]+")


def read(path: Place) -> Found | None:
    """The checkpoint of the files that a template names (``model_rank{rank}.pt``), or that a folder holds; or None.

    Of a folder the files of torch must be called alike but for one number, 0 to the last, and hold sharded tensors.
    Raises Damaged for a missing rank, Unsupported for parts of which nothing says where they belong.
    """
    files = _template(path) if RANK in str(path) else _series(path) if path.is_dir() else {}
    if not files:
        return None
    prove_all(files.keys(), max(files) + 1, path, lambda rank: f"the file of rank {rank}")
    trees = [load_path(files[rank]) for rank in glanced(sorted(files), files.__getitem__)]
    tree = join_ranks(trees, f"{path}: ")
    prove_joined({"": tree}, path, "save DTensors, or with torch.distributed.checkpoint")
    content = recognise.arranged(tree, path)
    reading = f"{files[0].name} to {files[len(files) - 1].name} are what {len(files)} ranks saved"
    return Found("torch.save", content.state, content.step, len(files), reading="" if RANK in str(path) else reading)


def _template(path: Place) -> dict[int, Place]:
    """The files of a template by rank; the rank stands in one of the path's parts, with or without leading zeros."""
    at = [i for i, part in enumerate(path.parts) if RANK in part]
    if len(at) != 1 or path.parts[at[0]].count(RANK) != 1:
        return {}
    above, part, below = LocalPlace(*path.parts[: at[0]]), path.parts[at[0]], path.parts[at[0] + 1 :]
    pattern = re.compile("([0-9]{1,7})".join(map(re.escape, part.split(RANK))))
    if not above.is_dir():
        return {}
    names = members.folders(above) if below else members.listed(above)
    files: dict[int, Place] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None and above.joinpath(name, *below).is_file():
            if int(match[1]) in files:
                raise Damaged(f"{path} names two files of rank {int(match[1])}, with and without leading zeros")
            files[int(match[1])] = above.joinpath(name, *below)
    return files if all(is_torch_file(all_of(file(p))) for p in files.values()) else {}


def _series(folder: Place) -> dict[int, Place]:
    """The torch files of a folder by the only number in which their names differ, if the first holds shards."""
    names = [n for n in members.listed(folder) if not n.endswith((".safetensors", *members.ATTACHED))]
    if len(names) < 2 or len({_NUMBER.sub("#", name) for name in names}) != 1:
        return {}
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    apart = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(apart) != 1:
        return {}
    files = {number[apart[0]]: folder / name for number, name in zip(numbers, names, strict=True)}
    first = files.get(0)
    if first is None or len(files) < len(names) or not is_torch_file(all_of(file(first))):
        return {}
    return files if has_shards(load_path(first)) else {}
