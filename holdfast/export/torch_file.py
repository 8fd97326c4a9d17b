"""torch's own file: one archive of all tensors and values, as `torch.save` makes it, for any `torch.load`.

`convert` calls `draft` for ``to="torch"``. What says how all belongs together comes last in the archive, so that no
tensor has to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast.buffers.stage import host_view
from holdfast.checkpoint import Checkpoint
from holdfast.export import pickles, zip_file
from holdfast.export.draft import Draft, Fixed, Span
from holdfast.export.selection import Leaf, Selection, check_values, nested
from holdfast.export.zip_file import Ending
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import whole
from holdfast.ondisk.containers import mapped

NAME = "state.pt"
"""How the file is called until it stands at its target."""


def draft(checkpoint: Checkpoint, selection: Selection) -> Draft:
    """One file. A value that differs by rank becomes the list of the values of all ranks."""
    check_values(selection, pickles.dumps)
    leaves = list(selection.tensors.values())
    members, at = zip_file.storages(leaf.nbytes for leaf in leaves)
    spans = [Span(leaf, whole(leaf.shape), NAME, m.data) for leaf, m in zip(leaves, members, strict=True)]

    def finish(sums: Sequence[str]) -> Iterator[Fixed]:
        totals = [int(total) for total in sums]
        tail, begin = b"", 0
        for m, total in zip(members, totals, strict=True):
            yield Fixed(NAME, begin, tail + zip_file.before(m))
            tail, begin = zip_file.after(m, total), m.data + m.nbytes
        ending = Ending(at, zip(members, totals, strict=True))
        keys = {leaf.name: str(number) for number, leaf in enumerate(leaves)}
        more = len(keys)

        def replaced(leaf: Any) -> Any:
            nonlocal more
            if isinstance(leaf, Leaf):
                return pickles.tensor(leaf.dtype, leaf.shape, leaf.nbytes, keys[leaf.name])
            if isinstance(leaf, torch.Tensor):
                key, more = str(more), more + 1
                ending.add(f"data/{key}", data_of(leaf))
                return pickles.tensor(dtypes.name_of(leaf.dtype), tuple(leaf.shape), leaf.nbytes, key)
            return leaf

        tree = mapped(nested(selection, checkpoint.per_rank), replaced)
        add_small(ending, pickles.dumps(tree))
        yield Fixed(NAME, begin, tail + ending.close())

    return Draft({NAME: at}, spans, "crc32", finish)


def add_small(ending: Ending, pickle: bytes) -> None:
    """The members that say what the storages are: the pickle, the byte order, the version of the layout."""
    ending.add("data.pkl", pickle)
    ending.add("byteorder", b"little")
    ending.add("version", b"3\n")


def archive(tree: Any, tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """A whole archive in memory; ``tree`` calls the storages of ``tensors`` by their numbers."""
    ending = Ending(0)
    for number, tensor in enumerate(tensors):
        ending.add(f"data/{number}", data_of(tensor))
    add_small(ending, pickles.dumps(tree))
    return ending.close()


def data_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on the CPU, row-major."""
    tensor = tensor.contiguous()
    return bytes(host_view(tensor.data_ptr(), tensor.nbytes)) if tensor.nbytes else b""
