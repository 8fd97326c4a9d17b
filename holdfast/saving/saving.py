"""What becomes of a save in the background: when its tensors may change, whether it is committed, where the time went.

The Saver makes it and returns it to its caller. Never starts a save by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from holdfast import events
from holdfast.buffers.stable import Copying
from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.events import BACKGROUND, Opened, log
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.storage.place import Place


@dataclass(frozen=True)
class Timing:
    """Where the time of one save went, in seconds, and its ``bytes`` on this rank.

    ``stall`` is what training waited: the call of `Saver.save`, and steps of optimizers that began before their tensors
    were copied. ``staging`` lasts from the call until all is copied, ``writing`` from then until this rank's files are
    durable, ``commit`` from then until the outcome is known; ``total`` is their sum. What has not happened is 0. Of
    a save that training waits for as a whole (a manager without a worker), all of it is ``staging``.

    Of this rank's tensors, ``bytes_in_call`` were copied before the call returned, since anything may change them, and
    ``bytes_beside`` beside training, while they held still for the next step of the optimizers that have them.
    """

    stall: float
    staging: float
    writing: float
    commit: float
    total: float
    bytes: int
    bytes_in_call: int = 0
    bytes_beside: int = 0


class Saving:
    """One save under way. Made by `Saver.save` and `CheckpointManager.step`.

    Attributes:
        path: Where it goes.
        step: The training step, or None.
        base: What it is based on.
        rank: The rank that this process is.
        began: When it was begun, in Unix seconds.
    """

    def __init__(
        self, path: Place, step: int | None, base: Saving | Place | None = None, rank: int = 0
    ) -> None:  # fmt: skip
        self.path, self.step = path, step
        self.began = time.time()
        """When it was begun, in unix seconds."""
        self._began = time.monotonic()
        self._call = self._staged_at = self._written_at = self._ended_at = 0.0
        self._bytes = self._bytes_in_call = self._bytes_beside = 0
        self.copying = Copying(path, rank, step)
        """For the Saver: steps of optimizers wait for it."""
        self.planned = threading.Event()
        """For the Saver: set once the ranks agree on the plan, or will not."""
        self._span = Opened()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[Saving], None]] = []
        self._error: BaseException | None = None
        self._heard = False
        self._in_callbacks: int | None = None  # the thread that calls them
        self._thread: threading.Thread | None = None
        self._run: Callable[[], None] = lambda: None
        self._skipped = False
        self._base = base

    @staticmethod
    def committed(path: Place, step: int | None) -> Saving:
        """One that is there already, of an earlier process perhaps."""
        saving = Saving(path, step)
        saving.finish(None)
        return saving

    def __repr__(self) -> str:
        state = "skipped" if self._skipped else "failed" if self._error else "done" if self.done else "under way"
        return f"Saving({str(self.path)!r}, step={self.step}, {state})"

    @property
    def done(self) -> bool:
        """Whether the outcome is known: committed, failed or skipped."""
        return self._done.is_set() or self._in_callbacks == threading.get_ident()

    @property
    def skipped(self) -> bool:
        """Whether the save did not take place because no slot was free on some rank (``busy="skip"``)."""
        return self._skipped

    @property
    def failed(self) -> BaseException | None:
        """Why it failed, once that is known; None for a save that is under way or committed."""
        return self._error

    @property
    def heard(self) -> bool:
        """Whether its failure has been raised to somebody, and so need not be raised by another call."""
        return self._heard

    def hear(self) -> None:
        """Take its failure, if there will be one, as heard of."""
        self._heard = True

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until every tensor of the state is copied and may be changed, also if the save fails.

        Steps of the optimizers that own them wait by themselves.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: It is not staged after ``timeout`` seconds. The save goes on.
        """
        if not self.copying.wait(timeout):
            raise TimeoutError(f"{self.path} is not staged after {timeout} s")

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the save is committed and durable on every rank.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            The checkpoint, opened.

        Raises:
            SaveFailed: The save has failed, or was skipped. The same on every rank.
            TimeoutError: There is no outcome after ``timeout`` seconds. The save goes on.
        """
        if not self.settled(timeout) and self._error is not None:
            self._heard = True
            raise self._error
        return Checkpoint(self.path, self._ended_at - self._began)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait for the outcome without raising a failure.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            True if it is committed.

        Raises:
            TimeoutError: There is no outcome after ``timeout`` seconds. The save goes on.
        """
        if self._in_callbacks != threading.get_ident() and not self._done.wait(timeout):
            raise TimeoutError(f"{self.path} is not committed after {timeout} s")
        return self._error is None

    def to_reuse(self) -> Place | None:
        """What a later save may reuse: this one or, if it failed, what it could reuse itself. Waits for both."""
        at: Saving | Place | None = self
        while isinstance(at, Saving) and not at.settled():
            at = at._base
        if at is not self:
            self._base = at  # so that no chain grows, however many saves fail
        return at.path if isinstance(at, Saving) else at

    def may_reuse(self) -> list[Place]:
        """What this save may reuse, or a later one in its place, as far as that is not settled."""
        places: list[Place] = []
        at = self._base
        while isinstance(at, Saving):
            places.append(at.path)
            at = at._base
        return places if at is None else [*places, at]

    def follow(self, save: Callable[[], Checkpoint]) -> None:
        """Do a save that training waits for, here and now, and be its outcome. For a manager without a worker."""
        failed = None
        try:
            done = save()
        except SaveFailed as error:
            failed = error
        except BaseException as error:
            self._heard = True
            self.finish(error)
            raise
        else:
            try:
                self._bytes = done.nbytes
            except HoldfastError as error:  # committed on all ranks: a look that fails on one must not part them
                log.warning("%s is saved, but its size is not known: %s", self.path, error)
        self.returned()
        self._staged_at = self._written_at = time.monotonic()
        self.finish(failed)

    def add_done_callback(self, then: Callable[[Saving], None]) -> None:
        """Call ``then(self)`` once the outcome is known: at once if it is, else from the thread that learns it, before
        `wait` returns.

        Args:
            then: A function of the saving.
        """
        with self._lock:
            if not self._ended_at:
                self._then.append(then)
                return
        then(self)

    @property
    def timing(self) -> Timing:
        """Where the time went; of a save under way, the stall so far."""
        ends = [self._began, self._staged_at, self._written_at, self._ended_at]
        staging, writing, commit = (max(b - a, 0.0) if a and b else 0.0 for a, b in pairwise(ends))
        stall = self._call + self.copying.waited
        beside = self._bytes_beside if self._staged_at else 0
        return Timing(
            stall, staging, writing, commit, max(ends) - self._began, self._bytes, self._bytes_in_call, beside
        )

    def stay_behind(self) -> None:
        """In a forked child: the thread that would tell the outcome is not here, so nobody may wait for it."""
        if not self._done.is_set():
            self._error = self._error or HoldfastError(
                f"the save of {self.path} goes on in process {os.getppid()}, from which this one was forked: ask there"
            )
            self._done = threading.Event()  # a thread may have been about to set the other one, and hold its lock
            self._done.set()

    # For the Saver

    def begin(self, run: Callable[[], None], rank: int) -> None:
        """From now on steps wait for its copies; `start` will ``run`` it."""
        self._run = run
        self.copying.begin()
        self._span = events.begin(BACKGROUND, self.path, rank, whole=True, step=self.step, lane="saves")

    def start(self) -> None:
        """Go on in a thread of its own."""
        with interrupts_wait():
            # A daemon, and joined by `Saver.close`: an interpreter that ends would wait for other threads before its
            # exit handlers, and must not end under a thread that is still letting go of tensors.
            run, begun = self._run, threading.Event()

            def wait_and_run() -> None:
                begun.wait()
                run()

            thread = threading.Thread(target=wait_and_run, name="holdfast-save", daemon=True)
            thread.start()
            self._thread, self._run = thread, lambda: None
            begun.set()  # not before: the new thread would keep the interpreter for itself, for 5 ms at most

    @property
    def has_started(self) -> bool:
        """Whether it goes on in its thread, whatever becomes of the call."""
        return self._thread is not None

    def returned(self) -> None:
        """The call of `Saver.save` is over: what it took is a stall of training."""
        self._call = time.monotonic() - self._began

    def join(self) -> None:
        """Wait until the thread of a save whose outcome is known has let go of everything."""
        if self._thread is not None and self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()  # it ends: it does nothing any more but let go

    def known(self, timeout: float | None = None) -> bool:
        """Wait until the outcome is known; False if it is not after ``timeout`` seconds."""
        return self._done.wait(timeout)

    def end_planning(self, *, skipped: bool) -> None:
        """The ranks have a plan, or have skipped the save, or will not agree."""
        self._skipped = skipped
        self.planned.set()

    def note_copies(self, in_call: int, beside: int) -> None:
        """So many bytes are copied before the call returns, and so many beside training."""
        self._bytes_in_call, self._bytes_beside = in_call, beside

    def note_written(self, nbytes: int, staged_at: float, written_at: float) -> None:
        """When tensors were copied and files durable on this rank, by `time.monotonic`; 0.0 if they never were."""
        self._bytes, self._staged_at, self._written_at = nbytes, staged_at, written_at

    def finish(self, failed: BaseException | None) -> None:
        """The outcome. An interrupt is no failure of a save: it stays what it is where it was raised."""
        self._span.nbytes = self._bytes
        self._span.end(None if self._skipped else failed)
        if failed is None:
            self._base = None  # nobody asks past a save that is there; so no chain grows
        elif not isinstance(failed, Exception):
            failed = SaveFailed(f"{self.path} was interrupted ({type(failed).__name__}) before the save was committed")
        self._error, self._run = failed, lambda: None
        with self._lock:
            self._ended_at = time.monotonic()
        self.planned.set()
        self.copying.release()
        self.copying.torn()  # lets go of the tensors
        self._in_callbacks = threading.get_ident()  # callbacks may ask for the outcome
        callbacks, self._then = self._then, []  # who keeps a saving need not keep what they hold
        for then in callbacks:
            try:
                then(self)
            except Exception:  # noqa: BLE001 - a failure of a callback must not look like one of the save
                log.exception("a callback of %r failed", self)
        self._done.set()
        self._in_callbacks = None
