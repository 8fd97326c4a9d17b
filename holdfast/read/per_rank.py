"""What one rank saved as a value of its own, read back from that rank's file.

An opened checkpoint asks for it. Checks all that the file says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import torch

from holdfast.buffers.stage import host_view
from holdfast.errors import Damaged, HoldfastError, Unsupported
from holdfast.ondisk import datafile, dtypes, names, spans, values
from holdfast.ondisk.box import whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.read.files import DataFiles
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.wanted import Wanted
from holdfast.storage.place import Place

_SECTION = "state"  # any section: a piece's key is its name without one


def value_of_rank(files: DataFiles, of_ranks: str, path: str, rank: int, *, verify: Verify) -> Any:
    """The value that ``rank`` saved at ``path``; ``of_ranks`` are the numbers of all ranks' files, as of the manifest.

    Raises KeyError for a rank that saved none, Damaged for what no value is.
    """
    indices = spans.read(of_ranks)
    if not 0 <= rank < indices.count:
        raise KeyError(f"{files.folder} was saved by {indices.count} ranks: there is no value of rank {rank}")
    index = indices.at(rank)
    header, where = files.header(index), files.path(index)
    base = f"{names.in_section(path)}@{rank}"

    def fetch(key: str) -> torch.Tensor:
        piece = header.pieces.get(key)
        if piece is None:
            raise Damaged(f"{where} does not hold {key} as the manifest says")
        shape = _stored_shape(piece, header.metadata, where)
        record = TensorRecord(piece.dtype, shape, None, str(index) if 0 not in shape else "")
        result = torch.empty(shape, dtype=dtypes.torch_dtype(piece.dtype), device="cpu")
        read_boxes(files, [Wanted(f"{_SECTION}/{key}", record, whole(shape), result)], verify=verify)
        return result

    try:
        text = fetch(base)
        encoded = msgspec.json.decode(bytes(host_view(text.data_ptr(), text.nbytes)) if text.nbytes else b"")
        return values.decode_tree(encoded, lambda reference: fetch(f"{base}/{reference}"))
    except Unsupported as error:  # an array, and no NumPy
        raise Unsupported(f"{where}: {base}: {error}") from None
    except HoldfastError:
        raise
    except values.FAULTS as error:  # nothing that `values.encode_tree` makes
        raise Damaged(f"{where} holds no value at {base}: {error}") from None


def _stored_shape(piece: datafile.Piece, metadata: Mapping[str, str], where: Place) -> tuple[int, ...]:
    # A number of a type that safetensors cannot name looks like one row of bytes; its true shape is noted.
    try:
        noted = msgspec.json.decode(metadata.get("shapes", "{}"), type=dict[str, tuple[int, ...]])
    except msgspec.MsgspecError as error:
        raise Damaged(f"{where}: the header that holds {piece.key} has no valid shapes: {error}") from None
    shape = noted.get(piece.key, piece.lengths)
    if any(n < 0 for n in shape) or prod(shape) * dtypes.itemsize(piece.dtype) != piece.nbytes:
        raise Damaged(
            f"{where} holds {piece.nbytes} bytes of {piece.key}, which is not {piece.dtype} {list(shape)[:9]}"
        )
    return shape
