"""What the machine can do: copies between device and host, memory that is pinned, sums, fingerprints, the disk.

The other parts are held against these figures. Run by `benchmarks.gpu`, first and alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from statistics import median

import torch
import xxhash

import holdfast
from benchmarks import device as raw
from benchmarks.gpu.part import DURABLE, SHARED, Part, a_part, free, synchronize
from holdfast.buffers import device as staging
from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.memory import buffer
from holdfast.buffers.stage import host_tensor, host_view
from holdfast.ondisk.box import whole
from holdfast.policies.incremental.fingerprint import Fingerprints
from holdfast.write.buffer import CHUNK, StagingBuffer
from holdfast.write.worker import start


def facts(part: Part) -> None:
    """What one must know of the machine to read its figures."""
    part.fact("torch", str(torch.__version__))
    part.fact("Python", platform.python_version())
    part.fact("holdfast", holdfast.__version__)
    part.fact("cores", os.cpu_count())
    part.fact("host memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB")
    if part.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        part.fact("device", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
        part.fact("CUDA", str(torch.version.cuda))
    else:
        part.fact("device", "none: the CPU, with a device that pretends; figures mean nothing")


def seconds_of(call: Callable[[], object], device: str, times: int = 5) -> float:
    """The median of a few calls, after one that does not count."""
    seconds = []
    for _ in range(times + 1):
        synchronize(device)
        began = time.monotonic()
        call()
        synchronize(device)
        seconds.append(time.monotonic() - began)
    return median(seconds[1:])


def copies(part: Part) -> None:
    """The raw rates, by torch alone: these are the limits."""
    nbytes = (64 if part.small else 4096) << 20
    far = torch.ones(nbytes, dtype=torch.uint8, device=part.device)
    plain = torch.empty(nbytes, dtype=torch.uint8)
    plain.fill_(1)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=part.device == "cuda")
    for what, to, source in [
        ("to the host, pinned", pinned, far), ("to the host, pageable", plain, far),
        ("to the device, pinned", far, pinned), ("to the device, pageable", far, plain),
    ]:  # fmt: skip
        taken = seconds_of(lambda to=to, source=source: to.copy_(source, non_blocking=True), part.device)
        part.row(what=what, unit="GB/s", value=nbytes / taken / 1e9)


def arena(part: Part) -> None:
    """Memory as a Saver takes it: what it costs to have, and how fast a device copies into it, window by window."""
    count = 4 if part.small else 128
    nbytes = count * CHUNK
    far = part.there(torch.ones(nbytes, dtype=torch.uint8, device=part.device))
    for kind in ("process", "thread"):
        slot = StagingBuffer(0, start(kind))
        began = time.monotonic()
        slot.reserve(nbytes, touch=True)
        touched = time.monotonic()
        slot.reserve(nbytes, pinned=True)
        part.row(what=f"staging for a {kind}: touched", unit="s/GB", value=(touched - began) / nbytes * 1e9)
        part.row(what=f"staging for a {kind}: pinned", unit="s/GB", value=(time.monotonic() - touched) / nbytes * 1e9)

        def fill(slot: StagingBuffer = slot) -> None:
            slot.begin()
            copier, windows = Copier(Moments()), [slot.take(CHUNK, 1.0) for _ in range(count)]
            for number, window in enumerate(windows):
                if window is not None:
                    copier.copy(far, number * CHUNK, CHUNK, window.address)
            copier.moment().wait()
            for window in windows:
                if window is not None:
                    slot.give(window)

        taken = seconds_of(fill, part.device)
        part.row(what=f"staging for a {kind}: copied into", unit="GB/s", value=nbytes / taken / 1e9)
        slot.worker.close()
        slot.close()


def small_tensors(part: Part) -> None:
    """Ten thousand of 4 KiB: gathered on the device, then copied."""
    count = 200 if part.small else 10_000
    tensors = [part.there(torch.ones(4096, dtype=torch.uint8, device=part.device)) for _ in range(count)]
    memory = buffer(count * 4096)
    staging.pin(memory.address, count * 4096)

    def copy() -> None:
        copier = Copier(Moments())
        for number, tensor in enumerate(tensors):
            copier.copy(tensor, 0, 4096, memory.address + number * 4096)
        copier.moment().wait()

    part.row(what="small tensors, gathered", unit="us each", value=seconds_of(copy, part.device, 3) / count * 1e6)
    staging.unpin(memory.address)


def sums(part: Part) -> None:
    """XXH3 by one thread over memory that a device copied into, and fingerprints taken on the device."""
    nbytes = (16 if part.small else 1024) << 20
    memory = buffer(nbytes)
    host_tensor(memory.address, nbytes).fill_(7)
    view = host_view(memory.address, nbytes)
    taken = seconds_of(lambda: xxhash.xxh3_64(view), "cpu", 3)
    part.row(what="XXH3, one thread", unit="GB/s", value=nbytes / taken / 1e9)
    far, made = part.there(torch.ones(nbytes, dtype=torch.uint8, device=part.device)), Fingerprints()
    taken = seconds_of(lambda: made.take([("t", whole(far.shape), far)], Copier(Moments())), part.device, 3)
    part.row(what="fingerprints on the device", unit="GB/s", value=nbytes / taken / 1e9)


def disks(part: Part) -> None:
    """The limit of the disk, and how fast holdfast's own writers make a durable file there and in shared memory."""
    nbytes = (32 if part.small else 3072) << 20
    memory = raw.buffers(huge=True)
    for what, call in (("write", raw.raw_write), ("read", raw.raw_read)):
        began = time.monotonic()
        call(part.work / "raw", *([nbytes] if what == "write" else []), memory)
        part.row(what=f"the disk, raw {what}", unit="GB/s", value=nbytes / (time.monotonic() - began) / 1e9)
    (part.work / "raw").unlink()
    state = {"t": torch.ones(nbytes, dtype=torch.uint8)}
    places = [("the disk", part.work)]
    if free(SHARED) > 4 * nbytes:
        places.append(("shared memory", part.shared))
    for what, folder in places:
        folder.mkdir(exist_ok=True)
        began = time.monotonic()
        holdfast.save(state, folder / "c")
        part.row(what=f"{DURABLE} to {what}", unit="GB/s", value=nbytes / (time.monotonic() - began) / 1e9)
        shutil.rmtree(folder / "c")


def main() -> None:
    """The part."""
    with a_part("rates") as part:
        facts(part)
        for measure in (copies, arena, small_tensors, sums, disks):
            try:
                measure(part)
            except Exception as error:
                part.row(what=measure.__name__, unit="", value=None, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
