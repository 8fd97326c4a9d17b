"""Reuses folded into a manifest: every cell names the file that holds it, and files that nobody wrote are gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.commit.draft import Share, joined
from holdfast.errors import HoldfastError
from holdfast.ondisk import datafile, manifest, part
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Part, ReusedFile

SAVE = "a" * 16


def _file(section: str, rank: int, world: int, save: str = SAVE) -> FileRecord:
    path = datafile.file_name(section, rank, world, save)
    return FileRecord(path, 8192, 4096, "0" * 32, None if save == SAVE else save)


def _drafted(world: int, tensors: int, sections: tuple[str, ...] = ("m", "o")) -> Manifest:
    """Every tensor is cut into a row for each rank, and each rank writes a file for each section."""
    sections = sections[:tensors]
    files = [_file(section, rank, world) for section in sections for rank in range(world)]
    named = [f"{sections[i % len(sections)]}/t{i}" for i in range(tensors)]
    return Manifest(
        save=SAVE, run="b" * 16, step=1, created="", producer={}, world_size=world,
        files=[manifest.file_row(FileRecord(file.path, 0, 0, "")) for file in files],
        tensors={
            name: TensorRecord(
                "float32", (world, 4), [1, 4] if world > 1 else None,
                manifest.ranges(range(sections.index(name[0]) * world, (sections.index(name[0]) + 1) * world)),
            )
            for name in named
        },
        values={}, containers={}, aliases={}, per_rank={}, attachments=[],
    )  # fmt: skip


def _cite(section: str, rank: int, world: int, save: str, tensors: list[int]) -> ReusedFile:
    return ReusedFile(tuple(_file(section, rank, world, save)), manifest.ranges(tensors))  # type: ignore[arg-type]


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_every_cell_is_where_its_rank_says(data: st.DataObject, world: int, tensors: int) -> None:
    drafted = _drafted(world, tensors)
    where: dict[tuple[int, int], str] = {}  # (tensor, rank): the path of its file
    cites: list[list[ReusedFile]] = []
    written = []
    for rank in range(world):
        own: dict[tuple[str, str], list[int]] = {}
        for number, name in enumerate(drafted.tensors):
            save = data.draw(st.sampled_from([SAVE, "1" * 16, "2" * 16]))
            own.setdefault((name[0], save), []).append(number)
            where[number, rank] = datafile.file_name(name[0], rank, world, save)
        cites.append([_cite(at, rank, world, save, found) for (at, save), found in own.items() if save != SAVE])
        written += [_file(section, rank, world) for section, save in own if save == SAVE]
    dids = [Share([f for f in written if f.path[2:7] == f"{rank:05d}"], cites[rank]) for rank in range(world)]
    record = joined(drafted, dids)
    assert manifest.decode(manifest.encode(record), "here") == record
    for number, tensor in enumerate(record.tensors.values()):
        paths = [record.data_files[index].path for index in manifest.expand(tensor.files)]
        assert paths == [where[number, rank] for rank in range(world)]
    assert {file.path for file in record.data_files} == set(where.values()), "nothing but what is needed"


def test_many_ranks_and_tensors_stay_a_few_ranges() -> None:
    world, tensors = 1024, 600
    drafted = _drafted(world, tensors, ("m",))
    frozen = list(range(tensors - 6))
    cites = [[_cite("m", rank, world, "1" * 16, frozen)] for rank in range(world)]
    record = joined(drafted, [Share([_file("m", rank, world)], cites[rank]) for rank in range(world)])
    assert {tensor.files for tensor in record.tensors.values()} == {f"0-{world - 1}", f"{world}-{2 * world - 1}"}
    everything = [[_cite("m", rank, world, "1" * 16, list(range(tensors)))] for rank in range(world)]
    record = joined(drafted, [Share([], everything[rank]) for rank in range(world)])
    assert {tensor.files for tensor in record.tensors.values()} == {f"0-{world - 1}"}


@pytest.mark.parametrize(
    "written, cites, told",
    [
        ([_file("m", 0, 1)], [_cite("x", 0, 1, "1" * 16, [0])], "which nobody planned"),
        ([], [_cite("m", 0, 1, "1" * 16, [0])], "neither written nor reused"),
        ([], [_cite("m", 0, 1, "1" * 16, [0]), _cite("m", 0, 1, "2" * 16, [0])], "reused for the same tensors"),
        ([], [_cite("m", 0, 1, "1" * 16, [0, 1]), _cite("m", 0, 1, "2" * 16, [0])], "reused twice"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(written: list[FileRecord], cites: list[ReusedFile], told: str) -> None:
    with pytest.raises(HoldfastError, match=told):
        joined(_drafted(1, 2, ("m",)), [Share(written, cites)])


def test_values_that_differ_by_rank_stay_in_their_files() -> None:
    drafted = _drafted(2, 2, ("m",))
    drafted = Manifest(**{**{f: getattr(drafted, f) for f in drafted.__struct_fields__}, "per_rank": {"m/r": "0-1"}})
    cites = [[_cite("m", 0, 2, "1" * 16, [0, 1])], [_cite("m", 1, 2, "1" * 16, [0, 1])]]
    record = joined(drafted, [Share([_file("m", rank, 2)], cites[rank]) for rank in range(2)])
    assert record.per_rank == {"m/r": "0-1"} and [tensor.files for tensor in record.tensors.values()] == ["2-3", "2-3"]


def test_a_part_that_cites_is_not_read_by_who_does_not_know_citations() -> None:
    cites = [_cite("m", 0, 1, "1" * 16, [0])]
    one = Part(version=part.REUSING, save=SAVE, rank=0, world_size=1, files=[], reused=cites)
    assert part.decode(part.encode(one), "here") == one
    with pytest.raises(HoldfastError, match="another version"):
        part.decode(part.encode(Part(save=SAVE, rank=0, world_size=1, files=[], reused=cites)), "here")
