"""The systems compared, each as two functions: save durably, load in place.

Called by the jobs, on every rank. `torch.save` and safetensors know no ranks: each rank keeps its own local shards.
Never tuned: each system as its documentation shows it, plus the fsync without which a save is a promise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from benchmarks.states import State, local_tensors

PART = 512 << 10
"""Bytes of one plain read: so many are still in the core's cache when they are summed."""


@dataclass(frozen=True)
class Told:
    """Bytes as a system itself reports them."""

    needed: int
    read: int


@dataclass(frozen=True)
class System:
    """``reshards``: whether it can load on another number of ranks. ``mapped``: it reads by mmap, unseen by rchar.

    ``of``: the system whose checkpoints it loads, where it saves none itself. ``floor``: it does only what no load can
    do without.
    """

    name: str
    save: Callable[[State, Path, int], None]
    load: Callable[[State, Path, int], Told | None]
    reshards: bool = False
    mapped: bool = False
    of: str = ""
    floor: bool = False


def _save_holdfast(state: State, folder: Path, rank: int) -> None:
    holdfast.save(state, folder)


def _load_holdfast(state: State, folder: Path, rank: int) -> Told:
    loaded = holdfast.load(folder, state)
    return Told(loaded.bytes_needed, loaded.bytes_read)


def _load_unchecked(state: State, folder: Path, rank: int) -> Told:
    loaded = holdfast.load(folder, state, verify=False)
    return Told(loaded.bytes_needed, loaded.bytes_read)


def _save_dcp(state: State, folder: Path, rank: int) -> None:
    dcp_save(state, storage_writer=FileSystemWriter(folder, sync_files=True))


def _load_dcp(state: State, folder: Path, rank: int) -> None:
    dcp_load(state, storage_reader=FileSystemReader(folder))


def _save_torch(state: State, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{rank}.pt").open("wb") as file:
        torch.save(dict(local_tensors(state)), file)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _load_torch(state: State, folder: Path, rank: int) -> None:
    _put(state, torch.load(folder / f"{rank}.pt", weights_only=True))


def _save_safetensors(state: State, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{rank}.safetensors"
    safetensors.torch.save_file(dict(local_tensors(state)), path)
    _sync(path)
    _sync(folder)


def _load_safetensors(state: State, folder: Path, rank: int) -> None:
    _put(state, safetensors.torch.load_file(folder / f"{rank}.safetensors"))


def _put(state: State, found: dict[str, torch.Tensor]) -> None:
    for name, tensor in local_tensors(state):
        tensor.copy_(found[name])


def _read(state: State, folder: Path, rank: int, *, summed: bool) -> None:
    """Fill each tensor by plain reads of a file of safetensors, a part at a time; ``summed``: and sum it."""
    fd = os.open(folder / f"{rank}.safetensors", os.O_RDONLY)
    try:
        start = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        header = json.loads(os.pread(fd, start - 8, 8))
        for name, tensor in local_tensors(state):
            memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            at = start + header[name]["data_offsets"][0]
            total = xxhash.xxh3_64()
            for done in range(0, len(memory), PART):
                part = memory[done : done + PART]
                if os.preadv(fd, [part], at + done) != len(part):
                    raise OSError(f"{folder}: {name} came short")
                if summed:
                    total.update(part)
            total.digest()
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


HOLDFAST = System("holdfast", _save_holdfast, _load_holdfast, reshards=True)
UNCHECKED = System("holdfast, unchecked", _save_holdfast, _load_unchecked, of=HOLDFAST.name)
DCP = System("torch DCP", _save_dcp, _load_dcp, reshards=True)
DCP_BY_HOLDFAST = System("DCP's, by holdfast", _save_dcp, _load_holdfast, reshards=True, of=DCP.name)
TORCH_SAVE = System("torch.save", _save_torch, _load_torch)
SAFETENSORS = System("safetensors", _save_safetensors, _load_safetensors, mapped=True)
READ = System("floor: read", _save_safetensors, partial(_read, summed=False), of=SAFETENSORS.name, floor=True)
SUMMED = System("floor: read and sum", _save_safetensors, partial(_read, summed=True), of=SAFETENSORS.name, floor=True)
ALL = (HOLDFAST, UNCHECKED, DCP, DCP_BY_HOLDFAST, TORCH_SAVE, SAFETENSORS, READ, SUMMED)
SYSTEMS = {system.name: system for system in ALL}
SAVERS = [system.name for system in SYSTEMS.values() if not system.of]
