"""One bit of any file of a checkpoint flips: opening or verifying finds it, and names the file and what is in it there.

Every byte of every file is covered: headers, padding, tensors, values of each rank, manifest, attachments, files cited
from another step. So there is no byte that nothing reads.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast.errors import Damaged, HoldfastError
from holdfast.ondisk import manifest
from holdfast.plan import plan
from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.citing import save_on, state_of

FEW, MANY = 80, 2000
"""Flips of each kind of checkpoint: five kinds."""


def _state(seed: int = 0, rank: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    weights = {f"layer.{i}": torch.randn(7 + i, 5, generator=made) for i in range(6)}
    return {
        "model": {**weights, "tied": weights["layer.0"], "half": torch.ones(9, dtype=torch.bfloat16)},
        "optimizer": {"step": torch.tensor(seed), "odd": torch.ones(3, dtype=torch.complex64), "lr": 0.1},
        "notes": [1, (2.5, None), {"raw": b"\0x"}, float("nan")],
        "mine": holdfast.PerRank({"seed": rank, "noise": torch.ones(3)}),
    }


def _save_on_rank(path: str) -> None:
    rank = torch.distributed.get_rank()
    state = _state(rank=rank)
    state["data"] = {"sampler": holdfast.PerRank(torch.arange(rank + 5))}
    holdfast.save(state, path, step=1)


def _plain(root: Path) -> Path:
    holdfast.save(_state(), root / "step-1", step=1)
    return root / "step-1"


def _ranks(root: Path) -> Path:
    pool.run(2, _save_on_rank, str(root / "step-1"))
    return root / "step-1"


def _incremental(root: Path) -> Path:
    save_on({**_state(), **state_of(1)}, root / "step-1")
    save_on({**_state(1), **state_of(2, head=1)}, root / "step-2", root / "step-1")
    assert any(path.startswith("../step-1/") for path, *_ in holdfast.open(root / "step-2").manifest.data_files)
    return root / "step-2"


def _volumes(root: Path) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "ROOM", 400)
        state = _state()
        state["model"] = {f"of_volumes.{name}": tensor for name, tensor in state["model"].items()}  # a plan of its own
        holdfast.save(state, root / "step-1", step=1)
    assert len(list((root / "step-1" / "model").iterdir())) > 1
    return root / "step-1"


def _attachments(root: Path) -> Path:
    files = {"config.json": b'{"a": 1}', "deep/er.txt": b"x" * 300, "empty": b""}
    holdfast.save(_state(), root / "step-1", step=1, files=files)
    return root / "step-1"


KINDS = {
    "plain": _plain,
    "ranks": _ranks,
    "incremental": _incremental,
    "volumes": _volumes,
    "attachments": _attachments,
}


class Flip(NamedTuple):
    """A bit of a file, and what stands there: a piece, ``header``, ``manifest`` or ``attachment``."""

    file: Path
    byte: int
    bit: int
    part: str


def _files(folder: Path) -> dict[Path, list[tuple[int, int, str]]]:
    """Every file of a checkpoint, cited ones too, with what lies where in it."""
    found: dict[Path, list[tuple[int, int, str]]] = {}
    record = manifest.decode((folder / manifest.FILE_NAME).read_bytes(), "it")
    found[folder / manifest.FILE_NAME] = [(0, (folder / manifest.FILE_NAME).stat().st_size, "manifest")]
    for path, nbytes, _ in record.attachments:
        if nbytes:
            found[folder / path] = [(0, nbytes, "attachment")]
    for file in record.data_files:
        path = LocalPlace(os.path.normpath(folder / file.path))
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        spans = [(0, begin, "header")]
        for key, entry in json.loads(data[8:begin]).items():
            if key != "__metadata__":
                low, high = entry["data_offsets"]
                spans.append((begin + low, begin + high, key))
        found[path] = spans
    assert all(sum(high - low for low, high, _ in spans) == path.stat().st_size for path, spans in found.items())
    return found


def _some(folder: Path, count: int, rng: Random) -> list[Flip]:
    """Half of them over all bytes alike, half over all files and what is in them, however small."""
    files = _files(folder)
    every = [(path, *span) for path, spans in files.items() for span in spans if span[1] > span[0]]
    flips = []
    for n in range(count):
        weights = [high - low for _, low, high, _ in every] if n % 2 else None
        path, low, high, part = rng.choices(every, weights)[0]
        flips.append(Flip(path, rng.randrange(low, high), rng.randrange(8), part))
    return flips


def _flip(flip: Flip) -> None:
    fd = os.open(flip.file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, flip.byte)[0] ^ 1 << flip.bit
        os.pwrite(fd, bytes([byte]), flip.byte)
    finally:
        os.close(fd)


def _told(folder: Path, flip: Flip) -> str:
    """What is wrong with how the flip was told; empty if all is right."""
    try:
        holdfast.open(folder).verify()
    except HoldfastError as error:
        text = str(error)
        if flip.file.name not in text:
            return f"does not name the file: {text}"
        if flip.part in ("manifest", "attachment"):
            return ""
        if not isinstance(error, Damaged):
            return f"is a {type(error).__name__}"
        if flip.part not in text:
            return f"does not name {flip.part}: {text}"
        others = [line for line in text.splitlines()[1:] if flip.file.name not in line]
        return f"blames others: {others}" if others else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was not found"


def _missed(folder: Path, count: int, seed: int) -> tuple[dict[Flip, str], Counter[str]]:
    missed, kinds = {}, Counter[str]()
    for flip in _some(folder, count, Random(seed)):
        kinds[flip.part if flip.part in ("manifest", "attachment", "header") else "tensor"] += 1
        _flip(flip)
        try:
            fault = _told(folder, flip)
            if fault:
                missed[flip] = fault
        finally:
            _flip(flip)
    holdfast.open(folder).verify()
    return missed, kinds


@pytest.mark.parametrize("kind", KINDS)
def test_every_flip_is_found_and_named(kind: str, tmp_path: Path) -> None:
    missed, kinds = _missed(KINDS[kind](tmp_path), FEW, 1)
    assert missed == {}
    assert kinds["manifest"] and kinds["header"] and kinds["tensor"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_one_of_ten_thousand_flips_is_found_and_named(kind: str, tmp_path: Path) -> None:
    missed, kinds = _missed(KINDS[kind](tmp_path), MANY, 2)
    print(kind, dict(kinds))
    assert missed == {}


def test_loading_finds_a_flip_in_what_it_reads(tmp_path: Path) -> None:
    """Verifying reads everything; a load checks what it takes."""
    folder = _plain(tmp_path)
    for flip in _some(folder, FEW, Random(3)):
        _flip(flip)
        try:
            with pytest.raises(HoldfastError, match=flip.file.name):
                checkpoint = holdfast.open(folder)
                checkpoint.state_dict()
                checkpoint.per_rank("mine", 0)
        finally:
            _flip(flip)
