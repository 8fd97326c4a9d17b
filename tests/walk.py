"""Which files of the package a tensor passes in a save or a load: a profiler looks for it in every call.

Tests and docs/architecture.md list the files with `walk`. A file counts if one of its functions has the tensor, its
address or its bytes among its arguments, locals or result. Functions that only answer yes or no do not count.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import holdfast

PACKAGE = Path(holdfast.__file__).parent
DEPTH = 4
"""How many containers or objects a tensor may lie in within a value that holds it."""

LARGEST = 4 << 20
"""Buffers of more bytes are not searched for the tensor's."""


class Call(NamedTuple):
    """A call of a function of the package that has the tensor, and the file that it was called from."""

    file: str
    function: str
    caller: str


@dataclasses.dataclass
class Walk:
    """The calls that had the tensor, in the order in which they began."""

    calls: list[Call]

    @property
    def files(self) -> list[str]:
        """The files that the tensor passed, in the order in which they first had it."""
        return list(dict.fromkeys(call.file for call in self.calls))

    def entries(self, among: Iterable[str] | None = None) -> list[str]:
        """The files one after the other, each named again where the tensor came back to it after another one.

        ``among``: look at these files alone, the stages, and pass over the helpers that several of them call.
        """
        stages = set(self.files if among is None else among)
        found: list[str] = []
        for call in self.calls:
            if call.file in stages and found[-1:] != [call.file]:
                found.append(call.file)
        return found


def walk(run: Callable[[], object], tensor: torch.Tensor) -> Walk:
    """Call ``run`` and follow ``tensor`` through the package, in every thread that it starts.

    ``tensor`` lies in host memory and holds bytes that nothing else does (random ones, 64 at least). For a load, give
    the tensor that is filled, with the saved numbers in it already.
    """
    host = tensor.detach().contiguous().view(torch.uint8).reshape(-1)
    probe = bytes(host[:64].tolist())
    search = _Search(probe, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
    frames: dict[int, tuple[Call, FrameType]] = {}  # with the frame itself, so that no other one gets its id
    holding: set[int] = set()
    questions: set[int] = set()
    lock = threading.Lock()

    def look(frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return"):
            return
        path = frame.f_code.co_filename
        if not path.startswith(f"{PACKAGE}/") or path.endswith("/events.py"):
            return
        with lock:
            if id(frame) not in frames:  # a generator is called each time that it goes on
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has the short one
                call = Call(path[len(f"{PACKAGE}/") :], name, _own_caller(frame))
                frames[id(frame)] = call, frame
            if id(frame) not in holding and (search.is_in(frame.f_locals) or search.is_in(result)):
                holding.add(id(frame))
            if event == "return" and isinstance(result, bool):
                questions.add(id(frame))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Walk([call for key, (call, _) in frames.items() if key in holding - questions])


def _own_caller(frame: FrameType) -> str:
    """The file of the package that a frame was called from; empty at the outermost call."""
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(f"{PACKAGE}/"):
        above = above.f_back
    return "" if above is None else above.f_code.co_filename[len(f"{PACKAGE}/") :]


class _Search:
    """Looks for a tensor in a value: the tensor itself, a number within its memory, or its first bytes."""

    def __init__(self, probe: bytes, address: int, nbytes: int) -> None:
        self._probe, self._memory, self._address = probe, range(address, address + nbytes), address

    def is_in(self, value: Any) -> bool:
        return self._is_in(value, DEPTH, set())

    def _is_in(self, value: Any, depth: int, seen: set[int]) -> bool:
        if isinstance(value, bool) or value is None:
            return False
        if isinstance(value, int):
            return value in self._memory
        if isinstance(value, torch.Tensor):
            return self._is_the_tensor(value)
        if isinstance(value, (bytes, bytearray, memoryview, ctypes.Array)):
            return self._has_bytes(value)
        if depth == 0 or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._is_in(inner, depth - 1, seen) for inner in _inside(value))

    def _is_the_tensor(self, tensor: torch.Tensor) -> bool:
        try:
            return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() == self._address
        except (NotImplementedError, RuntimeError):
            return False

    def _has_bytes(self, data: Any) -> bool:
        try:
            view = memoryview(data).cast("B")
            return len(self._probe) <= len(view) <= LARGEST and self._probe in bytes(view)
        except (BufferError, TypeError, ValueError):
            return False


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)
    elif type(value).__module__.startswith("holdfast."):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__struct_fields__", ())]
        names += [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in names:
            try:
                yield getattr(value, name)
            except AttributeError:
                continue
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
