"""Copies patches of this rank's memory into the files of a target, a window at a time, in a few threads.

`LiveWork` calls `write_cells`. Never holds more than a window of memory for each thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from holdfast.buffers.device import Copier, Moments, devices_of, pin, unpin
from holdfast.buffers.memory import Buffer, buffer, move
from holdfast.buffers.stage import address_of, as_integers, host_tensor, is_plain_memory
from holdfast.export.copying import DIRECT_FROM, in_order, opened, write
from holdfast.export.draft import WINDOW, Fixed
from holdfast.export.patches import Cell, Footprint, Patch, Run, edges_of, parted, runs_of
from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.naming import naming

ROOM = WINDOW + SECTOR
"""Bytes of memory for a window: an element may go on in the next one."""


def write_cells(
    cells: Mapping[Cell, Sequence[Patch]], beside: Mapping[Cell, Sequence[Footprint]] | None, content: Path,
    moments: Moments, progress: Callable[[int], None],
) -> list[Fixed]:  # fmt: skip
    """Write these windows into the files below ``content``, which have their room already.

    ``beside`` is given if ranks on several machines write these files, which may lose each other's changes of one page:
    what other ranks of this machine write. Then bytes in sectors that this machine does not fill alone are not written
    but returned.
    """
    kept: list[Fixed] = []
    with images(cells.values()) as image_of_thread:

        def work(item: tuple[Cell, Sequence[Patch]]) -> list[Fixed]:
            (path, number), patches = item
            image = image_of_thread()
            moments.make_current()
            fill(patches, image, number * WINDOW, moments)
            runs, places = runs_of(patch.place for patch in patches), [patch.place for patch in patches]
            edges: list[Run] = []
            if beside is not None:
                edges = edges_of(runs_of([*places, *beside.get((path, number), ())]))
            given = write_runs(content, path, image.memory.view, number * WINDOW, *parted(runs, edges))
            progress(sum(place.nbytes for place in places))
            return given

        for given in in_order(work, cells.items()):
            kept += given
    return kept


class Image:
    """Memory for a window of a file, and as much for what a device sends that does not lie there so."""

    def __init__(self, memory: Buffer | None = None, *, pinned: bool = False) -> None:
        self.memory = memory or buffer(ROOM)
        self.is_pinned = pinned and pin(self.memory.address, ROOM)
        self._apart: Buffer | None = None

    @property
    def apart(self) -> int:
        """The address of the second memory."""
        if self._apart is None:
            self._apart = buffer(ROOM)
        return self._apart.address

    def close(self) -> None:
        if self.is_pinned:
            unpin(self.memory.address)


@contextmanager
def images(windows: Iterable[Sequence[Patch]]) -> Iterator[Callable[[], Image]]:
    """Gives each thread that asks an image of its own, for these patches."""
    local, made = threading.local(), list[Image]()
    devices = devices_of(patch.tensor for patches in windows for patch in patches)
    pinned = any(device.type == "cuda" for device in devices)

    def image_of_thread() -> Image:
        if not hasattr(local, "image"):
            local.image = Image(pinned=pinned)
            made.append(local.image)
        image: Image = local.image
        return image

    try:
        yield image_of_thread
    finally:
        for image in made:
            image.close()


def fill(patches: Sequence[Patch], image: Image, base: int, moments: Moments) -> None:
    """Copy the patches into an image of their window, which begins at byte ``base`` of the file."""
    copier, origin = Copier(moments), image.memory.address - base
    sent: list[torch.Tensor] = []  # on devices, until they have arrived
    scattered: list[tuple[Patch, int]] = []
    used = 0
    try:
        for patch in patches:
            address_of(patch.tensor)  # raises if its memory was freed
            if patch.tensor.device.type == "cpu":
                _copy(patch.tensor, patch, origin)
                continue
            with copier.on(patch.tensor.device):
                tensor = _plain(patch.tensor)
                tensor = as_integers(tensor) if tensor.dtype == patch.dtype else tensor.to(patch.dtype)
                sent.append(tensor.contiguous())
            address = origin + patch.place.offset
            if not patch.place.is_run:
                address, used = image.apart + used, used + patch.place.nbytes
                scattered.append((patch, address))
            copier.copy(sent[-1], 0, patch.place.nbytes, address)
        if sent:
            copier.moment().wait()
    except BaseException:
        copier.give_up()
        raise
    for patch, address in scattered:
        _copy(host_tensor(address, patch.place.nbytes).view(patch.dtype).view(patch.place.lengths), patch, origin)


def _copy(tensor: torch.Tensor, patch: Patch, origin: int) -> None:
    """Copy the patch from ``tensor``, in host memory, to where it stands in the file whose first byte is ``origin``."""
    place = patch.place
    address = origin + place.offset
    if place.is_run and tensor.dtype == patch.dtype and is_plain_memory(tensor):
        move(address, tensor.data_ptr(), place.nbytes)
        return
    target = host_tensor(address, place.end - place.offset).view(patch.dtype)
    target = target.as_strided(place.lengths, [step // place.itemsize for step in place.steps])
    tensor = _plain(tensor)
    if tensor.dtype == patch.dtype:  # as integers, since torch copies some types in no other way
        tensor, target = as_integers(tensor), as_integers(target)
    target.copy_(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def write_runs(
    content: Path, name: str, view: memoryview, base: int, runs: Sequence[Run], kept: Sequence[Run]
) -> list[Fixed]:  # fmt: skip
    """Write these stretches of a window's ``view``; returns the bytes of those that are ``kept``."""
    path = content / name
    short = [run for run in runs if run[1] - run[0] < DIRECT_FROM]
    for begin, end in runs:
        if end - begin >= DIRECT_FROM:
            write(path, view[begin - base : end - base], begin)
    if short:
        with naming(path, "write"), opened(path, os.O_RDWR) as fd:
            for begin, end in short:
                disk.write_all(fd, view[begin - base : end - base], begin, path)
    return [Fixed(name, begin, bytes(view[begin - base : end - base])) for begin, end in kept]
