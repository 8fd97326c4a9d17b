"""A device that is not there: tensors that pretend to lie on it, and streams that do everything as late as they may.

`pretend` puts it where holdfast would use `torch.cuda`, `pretend_states` puts every tensor of a save or load there.
What is queued on a `Stream` here runs only when somebody waits for it, so code that forgets to wait, or to make one
stream wait for another, gets wrong bytes. Needs nothing but torch and pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from holdfast.buffers import device, scatter, stable
from holdfast.buffers.stage import host_tensor
from holdfast.commit import gather
from holdfast.state import Collected
from holdfast.write import filling

DEVICE = torch.device("cuda", 0)


class Pretended(torch.Tensor):
    """Says that it lies on a device; its bytes are on the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


def pretended(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(Pretended)


class Stream:
    """Work in order, done when somebody waits for it; once a device is ``broken`` every wait fails, for good."""

    broken = False

    def __init__(self, device: torch.device = DEVICE) -> None:
        self._work: list[Callable[[], object]] = []
        self.done = 0
        self._lock = threading.RLock()

    @property
    def left(self) -> int:
        """What is queued and not done."""
        return len(self._work) - self.done

    def queue(self, work: Callable[[], object]) -> int:
        with self._lock:
            self._work.append(work)
            return len(self._work)

    def run(self, until: int) -> None:
        with self._lock:
            while self.done < until:
                self.done += 1
                self._work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        self.queue(event.synchronize)


class Training(Stream):
    """The stream that trains: its work is done at once. While it is captured it may wait for no event, as in CUDA."""

    capturing = False

    def wait_event(self, event: Event) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
        super().wait_event(event)

    def queue(self, work: Callable[[], object]) -> int:
        work()
        return 0


class Event:
    """A moment of a stream."""

    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.queue(lambda: None)

    def synchronize(self) -> None:
        if self._stream.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self._stream.run(self._until)

    def query(self) -> bool:
        return self._stream.done >= self._until


class Device:
    """What stands in for `torch.cuda`; ``copies`` are the sizes of all copies to the host.

    While it is ``full`` it has no memory left.
    """

    full = False

    Event = Event

    def __init__(self) -> None:
        self.training = Training()
        self.streams: list[Stream] = []
        self.copies: list[int] = []
        self.pinned: dict[int, int] = {}
        self._here = threading.local()

    def set_device(self, device: torch.device) -> None:
        self._here.device = device

    def take_memory(self) -> None:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def pin(self, address: int, nbytes: int) -> bool:
        """As CUDA, refuse what is pinned already."""
        return address not in self.pinned and self.pinned.setdefault(address, nbytes) == nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._here, "stream", self.training)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        here = getattr(self._here, "device", None) == DEVICE or threading.current_thread() is threading.main_thread()
        assert here, "a thread of ours stands on another device, and would set up a context there"
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before


def pretend(patch: pytest.MonkeyPatch) -> Device:
    """Put the stand-in where the staging would use `torch.cuda`."""
    made = Device()

    class Host:
        def __init__(self, address: int, nbytes: int) -> None:
            self.to, self.nbytes = host_tensor(address, nbytes), nbytes

        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
            assert non_blocking and source.nbytes == self.nbytes
            made.copies.append(self.nbytes)
            made.current_stream().queue(lambda: self.to.copy_(source.as_subclass(torch.Tensor)))

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, parts: list[torch.Tensor]) -> torch.Tensor:
            assert made.current_stream() is not made.training, "memory of the side stream is made on the side stream"
            made.take_memory()
            joined = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
            plain = [part.as_subclass(torch.Tensor) for part in parts]
            made.current_stream().queue(lambda: torch.cat(plain, out=joined))
            return pretended(joined)

    def contiguous_parts(source: torch.Tensor) -> Iterator[torch.Tensor]:
        for part in real(source):
            on_its_way = part.data_ptr() != source.data_ptr()
            assert not on_its_way or made.current_stream() is not made.training, "made beside the copies, not after"
            if on_its_way:
                made.take_memory()
            yield part

    real = filling.contiguous_parts
    patch.setattr(filling, "contiguous_parts", contiguous_parts)
    patch.setattr(device, "host_tensor", Host)
    patch.setattr(device, "torch", Torch())
    patch.setattr(device, "_side", {})
    patch.setattr(device, "pin", made.pin)
    patch.setattr(device, "unpin", made.unpin)
    for module in (device, scatter):
        patch.setattr(module, "streams_of", lambda kind: made if kind == "cuda" else None)
    patch.setattr(stable, "is_capturing", lambda: made.training.capturing)
    return made


def pretend_states(patch: pytest.MonkeyPatch) -> None:
    """Let every tensor of a state that is saved or loaded lie on the stand-in."""

    def there(collected: Collected) -> Collected:
        for name, entry in collected.entries.items():
            views = [view._replace(tensor=pretended(view.tensor)) for view in entry.views]
            collected.entries[name] = entry._replace(views=views)
        for path, leaf in collected.per_rank.items():
            tensors = {key: pretended(tensor) for key, tensor in leaf.tensors.items()}
            collected.per_rank[path] = replace(leaf, tensors=tensors)
        return collected

    for module in (gather, import_module("holdfast.load")):
        real = module.collect
        patch.setattr(module, "collect", lambda *args, real=real, **options: there(real(*args, **options)))
