"""Bytes on their way to views that cannot be read into: of another dtype, scattered in memory, on a device.

`read` hands over what it has fetched and checked, a window at a time. Never holds more of a tensor than a window.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from holdfast.buffers.device import streams_of
from holdfast.buffers.memory import thread_buffer
from holdfast.buffers.stage import HOST, as_integers, host_tensor
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes, intersect, relative, whole

SHORT = 64
"""A matrix with fewer rows or columns is copied as any other view: torch has no quick way for less than 60 by 60."""

TRANSPOSED = 512 << 10
"""Bytes that are transposed at a time: so many stay in a core's own cache."""


def scatter(
    address: int, first: int, nbytes: int, lengths: Sequence[int], wanted: Box, view: torch.Tensor, dtype: str
) -> None:
    """Bytes ``first:first + nbytes`` of a row-major array of shape ``lengths`` to a view of the box ``wanted`` of it.

    They lie in host memory at ``address``. Casts where ``dtype``, the array's, is not the view's.
    """
    size = dtypes.itemsize(dtype)
    data = host_tensor(address, nbytes)
    if address % size:  # in the midst of a file of another library
        data = data.clone()
    data, at = data.view(dtypes.torch_dtype(dtype)), 0
    for box in flat_boxes(lengths, first // size, (first + nbytes) // size):
        part = intersect(box, wanted)
        if part is not None:
            source = data[at : at + box.size].view(box.lengths)
            deliver(narrowed(source, relative(part, box)), narrowed(view, relative(part, wanted)))
        at += box.size


def scatter_small(address: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Copy host memory from ``address`` on to views on devices: (offset in bytes, contiguous view), by rising offset.

    One copy brings everything that goes to one device, and the device distributes it. With a copy for each view, each
    waits for the stream, and so for the copies of all other threads.
    """
    by_device: defaultdict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for at, view in parts:
        by_device[view.device].append((at, view.reshape(-1).view(torch.uint8)))
    for there in by_device.values():
        begin, ends = there[0][0], [at + flat.numel() for at, flat in there]
        host = host_tensor(address + begin, ends[-1] - begin)
        try:
            staged = there[0][1].new_empty(host.numel()).copy_(host)
        except torch.OutOfMemoryError:
            for at, flat in there:
                flat.copy_(host[at - begin : at - begin + flat.numel()])
            continue
        # Cut into view, gap, view, gap, …: only every second part is copied.
        starts = [*(at for at, _ in there[1:]), ends[-1]]
        sizes = [
            n for (_, flat), end, start in zip(there, ends, starts, strict=True) for n in (flat.numel(), start - end)
        ]
        torch._foreach_copy_([flat for _, flat in there], list(staged.split(sizes)[::2]))


def narrowed(view: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length != view.shape[dim]:
            view = view.narrow(dim, start, length)
    return view


def deliver(host: torch.Tensor, view: torch.Tensor) -> None:
    """Copy a host tensor into any view of the same shape, casting if the types differ."""
    if host.dtype == view.dtype and not view.is_neg() and not view.is_conj():
        host, view = as_integers(host), as_integers(view)
        if _is_transposed(host, view):
            _transpose(host.squeeze(), view.squeeze())
            return
    view.copy_(host)


def _is_transposed(host: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether rows of ``host`` go to columns of ``view``, and are long enough for `_transpose` to be worth it."""
    host, view = host.squeeze(), view.squeeze()
    if host.dim() < 2 or min(host.shape[-2:]) < SHORT or view.device != HOST:
        return False
    return host.is_contiguous() and view.stride(-2) == 1 and view.stride(-1) > 1


def _transpose(host: torch.Tensor, view: torch.Tensor) -> None:
    # torch transposes a whole matrix into a contiguous one block by block. Into any other view it goes row by row,
    # which takes three times as long (measured): so we transpose a part into memory of its own, and copy that.
    if host.dim() > 2:
        for matrix, part in zip(host, view, strict=True):
            _transpose(matrix, part)
        return
    if view.t().is_contiguous():
        view.t().copy_(host.t())
        return
    rows = min(len(host), max(SHORT, TRANSPOSED // (host.shape[1] * host.itemsize)))
    nbytes = rows * host.shape[1] * host.itemsize
    # The thread's own: of new memory for each part the allocator keeps tens of megabytes.
    memory = host_tensor(thread_buffer("transposed", nbytes).address, nbytes).view(host.dtype)
    for at in range(0, len(host), rows):
        part = host[at : at + rows].t()
        view[at : at + rows].t().copy_(memory[: part.numel()].view(part.shape).copy_(part))


_forked = threading.Event()
os.register_at_fork(after_in_child=_forked.set)


def ready_for_threads() -> None:
    """Call this before several threads hand over at once.

    In a forked process torch makes its pool of threads again when it first needs one, and not safely if two threads do
    at a time: one may find none ("Invalid thread pool!", met once in some hundred loads of forked processes).
    """
    if _forked.is_set():
        torch.set_num_threads(torch.get_num_threads())
        _forked.clear()


class RunBuffer:
    """A window in which short runs of an array meet, from byte ``first`` on; handed over when all have come."""

    def __init__(self, first: int, nbytes: int, lengths: Sequence[int], view: torch.Tensor, dtype: str) -> None:
        self.nbytes, self.left, self.device = nbytes, 0, view.device
        self._host = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._to = first, lengths, view, dtype
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Where its first byte lies."""
        return self._host.data_ptr()

    def arrived(self) -> None:
        """One of the ``left`` runs is there."""
        with self._lock:
            self.left -= 1
            last = self.left == 0
        if last:
            first, lengths, view, dtype = self._to
            scatter(self.address, first, self.nbytes, lengths, whole(lengths), view, dtype)


class Streams:
    """The devices' streams that were current where a read was called: other threads queue their copies there.

    So copies come after what the caller queued before, and before what it queues afterwards.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def note(self, device: torch.device) -> None:
        """A view lies there; called by the caller's thread before any copy to it."""
        if device.type != "cpu" and device not in self._streams:
            module = streams_of(device.type)
            if module is not None:
                self._streams[device] = module, module.current_stream(device)

    def current(self) -> AbstractContextManager[object]:
        """Make them the current streams of this thread, and their devices its own: see `Moments.make_current`."""
        if not self._streams:
            return nullcontext()
        stack = ExitStack()
        for device, (module, stream) in list(self._streams.items()):
            module.set_device(device)
            stack.enter_context(module.stream(stream))
        return stack
