"""Copies patches of this rank's memory into the files of a target, a window at a time, in a few threads.

`LiveWork` calls `write_windows`. Never holds more than a window of memory for each thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from holdfast.buffers.device import Copier, Moments, devices_of, pin, unpin
from holdfast.buffers.memory import Buffer, buffer, move
from holdfast.buffers.stage import address_of, as_integers, host_tensor, is_plain_memory
from holdfast.export.copying import DIRECT_FROM, in_order, opened, sync, write
from holdfast.export.draft import Fixed
from holdfast.export.patches import LIMIT, Patch, base_of, edges_of, runs_of
from holdfast.storage.local import disk
from holdfast.storage.naming import naming

Run = tuple[int, int]


def write_windows(
    windows: Sequence[Sequence[Patch]], content: Path, moments: Moments, progress: Callable[[int], None], *,
    apart: bool,
) -> list[Fixed]:  # fmt: skip
    """Write these windows into the files below ``content``, which have their room already; all is durable at the end.

    ``apart``: ranks on several machines write these files, which may lose each other's changes of one page. Then bytes
    in sectors that this rank does not fill alone are not written but returned.
    """
    devices = devices_of(patch.tensor for window in windows for patch in window)
    edges: list[Fixed] = []
    with _images(pinned=any(device.type == "cuda" for device in devices)) as image_of_thread:

        def work(window: Sequence[Patch]) -> list[Fixed]:
            moments.make_current()
            image, copier = image_of_thread(), Copier(moments)
            try:
                _fill(window, image, copier)
            except BaseException:
                copier.give_up()
                raise
            kept = _write(window, image, content, apart=apart)
            progress(sum(patch.nbytes for patch in window))
            return kept

        for kept in in_order(work, windows):
            edges += kept
    for path in {window[0].path for window in windows}:
        sync(content / path)
    return edges


class _Image:
    """The memory of one thread: a stretch of a file, and room for what a device sends that does not lie there so."""

    def __init__(self, *, pinned: bool) -> None:
        self.memory = buffer(LIMIT)
        self.is_pinned = pinned and pin(self.memory.address, LIMIT)
        self._apart: Buffer | None = None

    @property
    def apart(self) -> int:
        """The address of as much memory beside the image."""
        if self._apart is None:
            self._apart = buffer(LIMIT)
        return self._apart.address

    def close(self) -> None:
        if self.is_pinned:
            unpin(self.memory.address)


@contextmanager
def _images(*, pinned: bool) -> Iterator[Callable[[], _Image]]:
    """Gives each thread that asks an image of its own."""
    local, images = threading.local(), list[_Image]()

    def image_of_thread() -> _Image:
        if not hasattr(local, "image"):
            local.image = _Image(pinned=pinned)
            images.append(local.image)
        image: _Image = local.image
        return image

    try:
        yield image_of_thread
    finally:
        for image in images:
            image.close()


def _fill(window: Sequence[Patch], image: _Image, copier: Copier) -> None:
    """Copy the patches into an image of their stretch of the file."""
    origin = image.memory.address - base_of(window[0])
    sent: list[torch.Tensor] = []  # on devices, until they have arrived
    scattered: list[tuple[Patch, int]] = []
    used = 0
    for patch in window:
        address_of(patch.tensor)  # raises if its memory was freed
        if patch.tensor.device.type == "cpu":
            _copy(patch.tensor, patch, origin)
            continue
        with copier.on(patch.tensor.device):
            tensor = _plain(patch.tensor)
            tensor = as_integers(tensor) if tensor.dtype == patch.dtype else tensor.to(patch.dtype)
            sent.append(tensor.contiguous())
        address = origin + patch.offset
        if not patch.is_run:
            address, used = image.apart + used, used + patch.nbytes
            scattered.append((patch, address))
        copier.copy(sent[-1], 0, patch.nbytes, address)
    if sent:
        copier.moment().wait()
    for patch, address in scattered:
        _copy(host_tensor(address, patch.nbytes).view(patch.dtype).view(patch.shape), patch, origin)


def _copy(tensor: torch.Tensor, patch: Patch, origin: int) -> None:
    """Copy the patch from ``tensor``, in host memory, to where it stands in the file whose first byte is ``origin``."""
    address, size = origin + patch.offset, patch.dtype.itemsize
    if patch.is_run and tensor.dtype == patch.dtype and is_plain_memory(tensor):
        move(address, tensor.data_ptr(), patch.nbytes)
        return
    target = host_tensor(address, patch.end - patch.offset).view(patch.dtype)
    target = target.as_strided(patch.shape, [step // size for step in patch.steps])
    tensor = _plain(tensor)
    if tensor.dtype == patch.dtype:  # as integers, since torch copies some types in no other way
        tensor, target = as_integers(tensor), as_integers(target)
    target.copy_(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def _write(window: Sequence[Patch], image: _Image, content: Path, *, apart: bool) -> list[Fixed]:
    """Write what the image holds; returns the edges in the place of writing them if ranks are ``apart``."""
    base, view, name = base_of(window[0]), image.memory.view, window[0].path
    path, edges, short = content / name, list[Fixed](), list[Run]()
    for begin, end in runs_of(window):
        for low, high in edges_of((begin, end)) if apart else ():
            edges.append(Fixed(name, low, bytes(view[low - base : high - base])))
            begin, end = (high, end) if low == begin else (begin, low)
        if end - begin >= DIRECT_FROM:
            write(path, view[begin - base : end - base], begin)
        elif begin < end:
            short.append((begin, end))
    if short:
        with naming(path, "write"), opened(path, os.O_RDWR) as fd:
            for begin, end in short:
                disk.write_all(fd, view[begin - base : end - base], begin, path)
    return edges
