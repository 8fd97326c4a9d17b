"""Device tensors to pinned host memory by a stream of their own, beside the stream that trains.

`write` copies with a `Copier`, `still` notes the moment of a save. Never blocks the host while it queues copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.buffers.stage import host_tensor
from holdfast.events import log

SMALL = 256 << 10
"""Bytes up to which a tensor goes with its neighbours in one copy: a copy of its own costs about 10 us."""

BATCH = 4 << 20
"""Bytes gathered on the device before they go."""


def streams_of(kind: str) -> Any:
    """The module with streams and events of a kind of device, or None if it has none: then copies wait."""
    module = getattr(torch, kind, None)
    whole = all(hasattr(module, name) for name in ("Stream", "Event", "set_device"))
    return module if kind != "cpu" and whole else None


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices with streams that hold any of these tensors."""
    devices = dict.fromkeys(t.device for t in tensors)
    return [d for d in devices if streams_of(d.type) is not None]


def _recorded(device: torch.device, stream: Any) -> Any:
    """An event at the present end of a stream."""
    module = streams_of(device.type)
    # One that lets a waiting host thread sleep: CUDA's own default is to spin, on a processor that training needs.
    event = module.Event(blocking=True) if module is torch.cuda else module.Event()
    event.record(stream)
    return event


def is_capturing() -> bool:
    """Whether this thread is recording a CUDA graph: what it calls now is not done now, and may wait for no event."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class Moments:
    """One moment of each device's stream: recorded now, waited for by other streams or by the host."""

    events: list[tuple[torch.device, Any]] = field(default_factory=list)

    @staticmethod
    def now(devices: Iterable[torch.device]) -> Moments:
        """The present moment of the streams that train."""
        return Moments([(d, _recorded(d, streams_of(d.type).current_stream(d))) for d in devices])

    def make_current(self) -> None:
        """Make their devices this thread's own. A new thread stands on the first device of the process.

        Any call to CUDA would set up a context there, half a gigabyte for each rank of a node.
        """
        for device, _ in self.events:
            streams_of(device.type).set_device(device)

    def hold_streams(self) -> None:
        """What is queued from now on comes after these moments; the host goes on at once."""
        for device, event in self.events:
            streams_of(device.type).current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Block the host until these moments have passed."""
        for _, event in self.events:
            event.synchronize()


_side: dict[torch.device, Any] = {}  # the side stream of each device


class Copier:
    """Copies of one save, all on side streams, none earlier than ``after``; many small tensors in one copy."""

    def __init__(self, after: Moments) -> None:
        self._after = after
        self._streams: dict[torch.device, Any] = {}
        self._small: list[tuple[torch.Tensor, int]] = []
        self._bytes = 0

    def copy(self, tensor: torch.Tensor, start: int, nbytes: int, address: int) -> None:
        """Queue bytes ``start:start + nbytes`` of a contiguous tensor to host memory at ``address``."""
        flat = tensor.reshape(-1).view(torch.uint8)
        if nbytes < flat.numel():
            flat = flat[start : start + nbytes]
        follows = self._small and self._small[0][1] + self._bytes == address
        if self._small and (self._small[0][0].device != flat.device or not follows or self._bytes >= BATCH):
            self.flush()
        if nbytes <= SMALL:
            self._small.append((flat, address))
            self._bytes += nbytes
            return
        self.flush()
        with self.on(flat.device):
            self._queue(flat, address)

    def flush(self) -> None:
        """Queue the small ones: gathered on the device, then one copy; each by itself if it has no memory left."""
        small, self._small, self._bytes = self._small, [], 0
        if not small:
            return
        with self.on(small[0][0].device):
            if len(small) > 1:
                with suppress(torch.OutOfMemoryError):
                    small = [(torch.cat([flat for flat, _ in small]), small[0][1])]
            for flat, address in small:
                self._queue(flat, address)

    def _queue(self, flat: torch.Tensor, address: int) -> None:
        # Where there is no stream there will be no event to wait for.
        host_tensor(address, flat.numel()).copy_(flat, non_blocking=flat.device in self._streams)

    def moment(self) -> Moments:
        """When all copies queued so far will be done."""
        self.flush()
        return Moments([(device, _recorded(device, stream)) for device, stream in self._streams.items()])

    def give_up(self) -> None:
        """Queue nothing more, and wait until no copy writes to host memory any more; never raises."""
        self._small, self._bytes = [], 0
        for device, stream in self._streams.items():
            with suppress(RuntimeError):  # of a device that failed, and copies no more
                _recorded(device, stream).synchronize()

    def on(self, device: torch.device) -> ExitStack:
        """Queue on the side stream of a device; where there are no streams, just run."""
        stack, module = ExitStack(), streams_of(device.type)
        if module is not None:
            if device not in self._streams:
                # One for all saves: memory that a stream has freed can be used again by this stream alone.
                if device not in _side:
                    _side.setdefault(device, module.Stream(device))
                self._streams[device] = _side[device]
                for known, event in self._after.events:
                    if known == device:
                        self._streams[device].wait_event(event)
            stack.enter_context(module.stream(self._streams[device]))
        return stack


def pin(address: int, nbytes: int) -> bool:
    """Lock host memory for a CUDA device to copy into; False, with a warning, if the system refuses."""
    if not torch.cuda.is_available():
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        log.warning("cannot pin %d bytes of staging memory (CUDA error %d): copies will be slower", nbytes, code)
        # CUDA keeps the error for the next kernel of this thread, which may be one of training: let it be this one.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code == 0


def unpin(address: int) -> None:
    """Take `pin` back."""
    torch.cuda.cudart().cudaHostUnregister(address)
