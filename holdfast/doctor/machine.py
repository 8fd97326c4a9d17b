"""The machine and its Python: versions, memory, limits; what holdfast lacks here, and what it cannot do."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from holdfast.doctor.finding import Finding
from holdfast.ondisk.version import __version__
from holdfast.ranks.heartbeat import amount

OLDEST_TORCH = (2, 10)
FILES_WANTED = 4096
SHM_WANTED = 64 << 20

_EXTRAS = (
    ("obstore", "cloud", "URLs (s3://, gs://, az://, https://)"),
    ("huggingface_hub", "hub", "pushing to hf://"),
    ("cryptography", "sign", "signed checkpoints"),
    ("zstandard", "zstd", "DCP checkpoints that are compressed"),
)


def findings() -> Iterator[Finding]:
    """All of it, in the order in which it is shown."""
    yield _python()
    yield _torch()
    yield Finding("holdfast", "ok", f"{__version__}, from {Path(__file__).parents[1]}")
    yield from (_extra(*extra) for extra in _EXTRAS)
    yield _device()
    yield _memory()
    yield _locked()
    yield _huge_pages()
    yield _shared()
    yield _files()
    yield _nameless()


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Finding("python", "fail", text, "holdfast runs on Linux only")
    return Finding("python", "ok", text)


def _torch() -> Finding:
    version = str(torch.__version__)
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < OLDEST_TORCH:
        return Finding("torch", "fail", f"{version} is too old", 'pip install --upgrade "torch>=2.10"')
    return Finding("torch", "ok", version)


def _extra(package: str, extra: str, serves: str) -> Finding:
    try:
        return Finding(package, "ok", metadata.version(package))
    except metadata.PackageNotFoundError:
        mend = f'pip install "holdfast-torch[{extra}]"'
        return Finding(package, "absent", f"not installed: optional, for {serves}", mend)


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding("accelerator", "ok", "none: pinned memory is not needed")
    names = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    try:
        torch.empty(mmap.PAGESIZE, dtype=torch.uint8, device="cpu").pin_memory()
    except RuntimeError as error:
        return Finding(
            "accelerator", "fail", f"{names}; memory cannot be pinned ({str(error).splitlines()[0]})",
            "raise the limit on locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1)",
        )  # fmt: skip
    return Finding("accelerator", "ok", f"{names}; memory can be pinned")


def _memory() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    text = f"{amount(total)}, {amount(free)} free; a background save takes as much as a rank writes"
    limit = _cgroup_limit()
    return Finding("memory", "ok", text if limit is None or limit > total else f"{text}; limited to {amount(limit)}")


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # another kind of control groups, or none
        return None
    return int(text) if text.isdigit() else None


def _locked() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else amount(soft)
    if torch.cuda.is_available() and 0 <= soft < 64 << 20:
        mend = "ulimit -l unlimited, or docker run --ulimit memlock=-1: staging memory is pinned"
        return Finding("locked memory", "warn", text, mend)
    return Finding("locked memory", "ok", text)


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge pages", "ok", "unknown on this system")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: copies into staging memory get quicker"
        return Finding("huge pages", "warn", "never", mend)
    return Finding("huge pages", "ok", chosen)


def _shared() -> Finding:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "warn", str(error), "mount it: ranks of one machine share what they read through it")
    free = status.f_bavail * status.f_frsize
    text = f"{amount(status.f_blocks * status.f_frsize)}, {amount(free)} free"
    if free < SHM_WANTED:
        return Finding("/dev/shm", "warn", text, "docker run --shm-size=8g; DataLoader workers need it too")
    return Finding("/dev/shm", "ok", text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES_WANTED:
        mend = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}: a load of many shards has as many files open"
        return Finding("open files", "warn", f"at most {soft}", mend)
    return Finding("open files", "ok", f"at most {soft}")


def _nameless() -> Finding:
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        mend = 'Saver(worker="thread"), or let the sandbox allow memfd_create'
        return Finding("writer process", "fail", f"memory cannot be shared with it: {error.strerror}", mend)
    return Finding("writer process", "ok", "memory can be shared with it")
