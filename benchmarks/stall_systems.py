"""What saves a training run while it goes on: holdfast and torch DCP, each by a thread or by a process.

Driven by the segments of the stall benches, on every rank. Beside them nothing at all, and a copy and a write alone.
Never counts for DCP what it needs once: its first save of a segment comes before the clock.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, async_save
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import holdfast
import holdfast.dcp
from benchmarks.stall_train import Training
from holdfast.ranks.ranks import ranks_of

CHUNK = 16 << 20
WRITERS = 2


@dataclass
class Started:
    """A save under way. ``durable``: when it was, by the monotonic clock.

    ``staged`` has to be waited for before parameters change; ``hooked`` tells, once the save is durable, how long
    hooks of the optimizer waited in its place. ``copying``: seconds and bytes of the copy, where they are known.
    """

    durable: Future[float]
    staged: Callable[[], object] = lambda: None
    hooked: Callable[[], float] = lambda: 0.0
    copying: Callable[[], tuple[float, int] | None] = lambda: None


class System:
    """One way to save. Made, prepared, used and closed within one segment; this one is never asked to save."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.waiter = ThreadPoolExecutor(1, thread_name_prefix="stall-wait")

    def prepare(self, folder: Path, saves: int) -> None:
        """Everything that is needed once; called by all ranks."""

    def gather(self, step: int) -> None:
        """What a program does itself before it saves, off the clock of the save: torch's `get_state_dict`."""

    def save(self, path: Path, step: int) -> Started:
        """Start a save; called by all ranks."""
        raise NotImplementedError

    def close(self) -> None:
        self.waiter.shutdown()

    def when(self, wait: Callable[[], object]) -> Future[float]:
        """The time at which ``wait`` came back."""
        return self.waiter.submit(lambda: (wait(), time.monotonic())[1])


class CopyAndWrite(System):
    """The least that can be: each rank's own bytes copied to memory and written directly, while training stands."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.writers = ThreadPoolExecutor(WRITERS)
        self.files: list[int] = []

    def prepare(self, folder: Path, saves: int) -> None:
        self.sources = [tensor.reshape(-1).view(torch.uint8) for tensor in self.training.local_tensors()]
        self.nbytes = -(-self.training.local_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = memoryview(memory)
        self.buffer = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self.buffer.zero_()
        for number in range(saves):
            path = folder / f"{dist.get_rank()}-{number}.raw"
            self.files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT))
            os.posix_fallocate(self.files[-1], 0, self.nbytes)

    def save(self, path: Path, step: int) -> Started:
        began, at = time.monotonic(), 0
        for source in self.sources:
            self.buffer[at : at + source.nbytes].copy_(source)
            at += source.nbytes
        copied = time.monotonic() - began
        fd = self.files.pop(0)
        list(self.writers.map(lambda start: self._write(fd, start), range(0, self.nbytes, CHUNK)))
        os.fsync(fd)
        os.close(fd)
        return Started(self.when(lambda: None), copying=lambda: (copied, at))

    def _write(self, fd: int, start: int) -> None:
        part = self.bytes[start : start + CHUNK]
        if os.pwrite(fd, part, start) != len(part):
            raise OSError(f"a write of {len(part)} bytes came short at {start}")

    def close(self) -> None:
        super().close()
        self.writers.shutdown()
        while self.files:
            os.close(self.files.pop())


class Holdfast(System):
    """One Saver, prepared."""

    def __init__(self, training: Training, worker: str) -> None:
        super().__init__(training)
        self.state = {"model": training.model, "optimizer": training.optimizer}
        self.saver = holdfast.Saver(worker=worker)

    def prepare(self, folder: Path, saves: int) -> None:
        self.saver.prepare(self.state)

    def save(self, path: Path, step: int) -> Started:
        return _started(self, self.saver, self.state, path, step)

    def close(self) -> None:
        self.saver.close()
        super().close()


def _started(system: System, saver: holdfast.Saver, state: dict[str, Any], path: Path, step: int) -> Started:
    began = time.monotonic()
    saving = saver.save(state, path, step=step)
    call = time.monotonic() - began
    return Started(
        system.when(saving.wait),
        hooked=lambda: max(saving.timing.stall - call, 0.0),
        copying=lambda: (saving.timing.staging, saving.timing.bytes),
    )


class Gathered(System):
    """One that is given bare tensors, as torch's `get_state_dict` has them."""

    def gather(self, step: int) -> None:
        training = self.training
        self.state = {
            "model": get_model_state_dict(training.model),
            "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
            "step": step,
        }


class HoldfastBare(Gathered, Holdfast):
    """The same Saver, for bare tensors."""

    def prepare(self, folder: Path, saves: int) -> None:
        self.gather(0)
        super().prepare(folder, saves)


class HoldfastDcp(Gathered):
    """``holdfast.dcp.async_save``, which makes a Saver at its first save."""

    def prepare(self, folder: Path, saves: int) -> None:
        self.gather(0)
        self.save(folder / "before", 0).durable.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "before")

    def save(self, path: Path, step: int) -> Started:
        began = time.monotonic()
        future = holdfast.dcp.async_save(self.state, checkpoint_id=path)
        call = time.monotonic() - began
        saving = _dcp_savers()[0]._earlier.savings[-1]
        return Started(
            self.when(future.result),
            hooked=lambda: max(saving.timing.stall - call, 0.0),
            copying=lambda: (saving.timing.staging, saving.timing.bytes),
        )

    def close(self) -> None:
        for saver in _dcp_savers():
            saver.close()
        ranks_of(None).remembered.pop("dcp", None)
        super().close()


def _dcp_savers() -> list[holdfast.Saver]:
    return list(ranks_of(None).remembered.get("dcp", {}).values())


class Dcp(Gathered):
    """``async_save`` as its documentation would have it for speed.

    One stager for all saves, so that its memory is used again; pinned on a GPU; shared with the writing process if
    there is one; ``overlap``: filled beside forward and backward. Plans cached, two writing threads. A process group of
    its own, without which its collectives would meet those of the training.
    """

    def __init__(self, training: Training, worker: AsyncCheckpointerType, overlap: bool) -> None:
        super().__init__(training)
        self.worker = worker
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=training.device == "cuda",
                use_shared_memory=worker is AsyncCheckpointerType.PROCESS,
                use_async_staging=overlap,
                use_non_blocking_copy=training.device == "cuda",
            )
        )

    def prepare(self, folder: Path, saves: int) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where its processes meet
        self.gather(0)
        with _muted():  # its process inherits that, and logs every save
            started = self.save(folder / "before", 0)
            started.staged()
            started.durable.result()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "before")

    def save(self, path: Path, step: int) -> Started:
        nbytes = self.training.local_bytes
        began = time.monotonic()
        answer = async_save(
            self.state,
            storage_writer=FileSystemWriter(path, sync_files=True, thread_count=WRITERS),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self.group,
            async_checkpointer_type=self.worker,
            async_stager=self.stager,
        )
        if not isinstance(answer, AsyncSaveResponse):
            return Started(self.when(answer.result))
        copied: list[float] = []
        answer.staging_completion.add_done_callback(lambda _: copied.append(time.monotonic() - began))
        return Started(
            self.when(answer.upload_completion.result),
            staged=answer.staging_completion.result,
            copying=lambda: (copied[0], nbytes),
        )

    def close(self) -> None:
        super().close()
        self.stager.close()
        # torch keeps the process for as long as the rank lives; the segments of other systems are to be without it.
        dcp_process._CHECKPOINT_PROCESS = None
        dist.destroy_process_group(self.group)


@contextmanager
def _muted() -> Iterator[None]:
    """Standard error to nowhere; a failure still comes as an exception."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


NOTHING, PURE = "no saves", "copy and write alone"
HOLDFAST = {"holdfast process": "process", "holdfast thread": "thread"}
BARE = {"holdfast process, bare": "process", "holdfast thread, bare": "thread", "holdfast.dcp": None}
"""Given what torch's `get_state_dict` has, as DCP is."""
DCP = {
    "DCP process": (AsyncCheckpointerType.PROCESS, False),
    "DCP thread": (AsyncCheckpointerType.THREAD, False),
    "DCP process, overlapped": (AsyncCheckpointerType.PROCESS, True),
    "DCP thread, overlapped": (AsyncCheckpointerType.THREAD, True),
}
"""Overlapped: staged beside the training. That is documented to need a GPU, and works without."""


def make(name: str, training: Training) -> System:
    """The system of this name; called by all ranks."""
    if name in HOLDFAST:
        return Holdfast(training, HOLDFAST[name])
    if name in DCP:
        return Dcp(training, *DCP[name])
    if name in BARE:
        worker = BARE[name]
        return HoldfastDcp(training) if worker is None else HoldfastBare(training, worker)
    return {NOTHING: System, PURE: CopyAndWrite}[name](training)


def check(name: str, path: Path) -> None:
    """Look whether a save is whole: every byte of holdfast's, the commit of DCP's. Raises if it is not."""
    if name in HOLDFAST or name in BARE:
        holdfast.open(path).verify()
    elif name in DCP and not (path / ".metadata").is_file():
        raise FileNotFoundError(f"{path} has no .metadata")
