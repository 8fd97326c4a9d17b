"""Patches of memory end where they belong in a file: boxes of any tensor, permuted, cast, in windows of any size."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.buffers.device import Moments
from holdfast.export import live_windows, patches
from holdfast.export.draft import Span
from holdfast.export.live_windows import write_cells
from holdfast.export.patches import (
    Footprint,
    Run,
    edges_of,
    parted,
    patch_of,
    patches_by_cell,
    places_by_cell,
    runs_of,
)  # fmt: skip
from holdfast.export.regions import Region
from holdfast.export.selection import Leaf
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.storage.local.disk import SECTOR
from tests.marks import examples


@st.composite
def arrangements(draw: st.DrawFn) -> dict[str, Any]:
    """A tensor, how it is cut among two ranks, and how its axes are permuted and cast in the target."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 33, 130]), min_size=ndim, max_size=ndim)))
    while torch.Size(shape).numel() > 60_000:
        shape = shape[1:]
    return {
        "shape": shape,
        "cuts": [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape],
        "dims": draw(st.permutations(range(len(shape)))),
        "saved": draw(st.sampled_from([torch.float32, torch.int16, torch.float64])),
        "cast": draw(st.booleans()),
        "offset": draw(st.integers(0, 3000)) * 8,
        "odd": draw(st.booleans()),
        "window": draw(st.sampled_from([SECTOR, 3 * SECTOR, 1 << 20])),
        "machines": draw(st.sampled_from(["one", "beside", "apart"])),
    }


def _memory(tensor: torch.Tensor, *, odd: bool) -> torch.Tensor:
    """The same elements, in memory of their own, whose axes lie in reverse order if it is ``odd``."""
    axes = list(reversed(range(tensor.dim())))
    return tensor.permute(axes).contiguous().permute(axes) if odd else tensor.clone()


@settings(max_examples=examples(400))
@given(arrangements())
def test_any_box_of_any_tensor_ends_where_it_belongs(tmp_path_factory: pytest.TempPathFactory, a: Any) -> None:
    shape, saved = a["shape"], a["saved"]
    number = torch.arange(torch.Size(shape).numel()).view(shape)
    source = (number % 251 if a["cast"] else number).to(saved)
    target = source.permute(a["dims"])
    target = target.to(torch.bfloat16) if a["cast"] and saved.is_floating_point else target
    record = TensorRecord(dtypes.name_of(saved), tuple(target.shape), None, "")
    leaf = Leaf("t", "s", record, dtypes.name_of(target.dtype), False)
    span = Span(leaf, whole(leaf.shape), "file", a["offset"])
    meta = torch.empty(leaf.shape, device="meta")
    back = sorted(range(len(shape)), key=a["dims"].__getitem__)
    region = Region("s", shape, whole(shape), 0, meta.permute(back).stride())
    boxes = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in product(*(list(pairwise(cuts)) for cuts in a["cuts"]))
    ]
    folder = tmp_path_factory.mktemp("p")
    size = a["offset"] + leaf.nbytes + 99
    (folder / "file").write_bytes(b"\xff" * size)
    region_of = [region.within(box) for box in boxes]
    assert [part.box for part in region_of if part is not None] == [box for box in boxes if box.size]
    edges = []
    with pytest.MonkeyPatch.context() as patched:
        for module in (patches, live_windows):
            patched.setattr(module, "WINDOW", a["window"])
        places = [
            places_by_cell(part.footprint(span) for part in region_of[rank::2] if part is not None) for rank in range(2)
        ]
        for rank in range(2):
            own = []
            for part in region_of[rank::2]:
                if part is not None:
                    slices = tuple(slice(o, e) for o, e in zip(part.box.offsets, part.box.ends, strict=True))
                    own.append(patch_of(part.footprint(span), _memory(source[slices], odd=a["odd"]), target.dtype))
            cells = patches_by_cell(own)
            assert {cell: runs_of(patch.place for patch in cells[cell]) for cell in cells} == {
                cell: runs_of(found) for cell, found in places[rank].items()
            }, "other ranks know what this one writes"
            beside = {"apart": {}, "beside": places[1 - rank], "one": None}[a["machines"]]
            edges += write_cells(cells, beside, folder, Moments(), lambda nbytes: None)
    assert not edges or a["machines"] != "one"
    inside = {e.offset // SECTOR for e in edges} - {a["offset"] // SECTOR, (size - 99) // SECTOR}
    assert not inside or a["machines"] == "apart"
    data = bytearray((folder / "file").read_bytes())
    for edge in edges:
        data[edge.offset : edge.offset + len(edge.data)] = edge.data
    assert len(data) == size and data[: a["offset"]] == b"\xff" * a["offset"] and data[-99:] == b"\xff" * 99
    wanted = target.contiguous().reshape(-1).view(torch.uint8)
    assert bytes(data[a["offset"] : -99]) == bytes(wanted.tolist())


def test_parts_end_at_windows_of_the_file_and_neighbours_are_one_run() -> None:
    nbytes = 48_000_000
    places = [Footprint("f", 4096, (3000, 4000), (16000, 4), 4), Footprint("f", 4096 + nbytes, (5,), (4,), 4)]
    cells = places_by_cell(places)
    assert [runs_of(cells["f", number]) for number in range(3)] == [
        [(4096, 16 << 20)], [(16 << 20, 32 << 20)], [(32 << 20, 4096 + nbytes + 20)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "edges"),
    [
        ([(0, 8192)], []), ([(4096, 4097)], [(4096, 4097)]), ([(1, 2)], [(1, 2)]), ([(4095, 4097)], [(4095, 4097)]),
        ([(1, 9000)], [(1, 4096), (8192, 9000)]), ([(4096, 9000)], [(8192, 9000)]), ([(1, 8192)], [(1, 4096)]),
        ([(1, 2), (5, 5000)], [(1, 2), (5, 5000)]),
    ],
)  # fmt: skip
def test_what_of_runs_shares_a_sector(runs: list[Run], edges: list[Run]) -> None:
    assert edges_of(runs) == edges


def test_runs_are_parted_by_edges() -> None:
    runs, edges = [(0, 10), (12, 20), (30, 40), (50, 60)], [(3, 5), (8, 14), (15, 16), (28, 45)]
    outside, inside = parted(runs, edges)
    assert outside == [(0, 3), (5, 8), (14, 15), (16, 20), (50, 60)]
    assert inside == [(3, 5), (8, 10), (12, 14), (15, 16), (30, 40)]
