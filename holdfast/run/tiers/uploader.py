"""What brings steps of the fast tier to the store: a thread beside training, one on the first rank of each node.

The tiers of a manager own one. Never fails a save, never waits for training, and never commits a step of which the
store lacks a file.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from contextlib import suppress

from holdfast.commit.commit import commit
from holdfast.commit.transfer import copy_files
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, RankLost, StorageError, Unsupported
from holdfast.events import begin, log
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile
from holdfast.ondisk.manifest import Manifest, own_path
from holdfast.policies.signing.keys import found_signature
from holdfast.ranks.heartbeat import Watch, at_work
from holdfast.run.options import ManagerOptions
from holdfast.run.retention import KeptSteps
from holdfast.run.tiers.backlog import Backlog
from holdfast.run.tiers.nodes import Instruction, Nodes
from holdfast.run.tiers.outage import Outage
from holdfast.run.tiers.stored import as_stored, lender_of, throttled
from holdfast.run.whole import lacking_files
from holdfast.storage.place import Place

LOOK = 0.2
"""Seconds between two looks at what other leaders have said."""

NEWS = 10.0
"""Seconds that a node waits for the manifest of what it is to upload."""

ATTEMPTS = 3
"""How often a step is sent of which the store then lacks a file."""

LEAVE = 2.0
"""Seconds that the thread gets to leave the store when it is stopped."""


class Uploader:
    """Uploads the ``backlog`` of ``fast`` to ``store``."""

    def __init__(
        self, fast: KeptSteps, store: KeptSteps, backlog: Backlog, nodes: Nodes, options: ManagerOptions
    ) -> None:  # fmt: skip
        self.current: int | None = None
        """The step that is under way, on leaders."""
        self._fast, self._store, self._backlog, self._nodes = fast, store, backlog, nodes
        self._options = options
        self._into = throttled(store.root, options.upload.bandwidth)
        self._sent = 0
        self._attempts: dict[str, int] = {}  # by save: how often a file was missing once all had been sent
        self._moved = time.monotonic()
        self._obeyed = 0  # the number of the last order that was carried out here
        self._wanted, self._looked = 1, 0  # numbers of looks: the last one asked for, and the last with nothing to do
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._outage = Outage(store.root, self._stop)
        self._thread: threading.Thread | None = None

    # Called by the tiers, from any thread

    def start(self) -> None:
        """Begin, if that was not done."""
        with self._changed:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="holdfast-uploader", daemon=True)
                _running.add(self)
                self._thread.start()

    def wake(self, step: int | None = None) -> None:
        """Tell that there is a new step on the fast tier."""
        with self._changed:
            if step is not None:
                self._backlog.made_again(step)
            self._wanted += 1
            self._changed.notify_all()

    def close(self, *, timeout: float | None, patience: float) -> None:
        """Wait until nothing is left to upload, then stop; not at all after `stop`. Idempotent.

        No longer than ``timeout`` seconds, and not if nothing has moved on any node for ``patience`` seconds.
        """
        now = began = time.monotonic()
        last, moved, moves = now, self._moved, 0
        try:
            while not self._stop.is_set() and not self._finished() and self._alive():
                now = time.monotonic()
                count = self._nodes.moves(moved=self._moved != moved)
                if (count, self._moved) != (moves, moved):
                    last, moved, moves = now, self._moved, count
                if (timeout is not None and now - began >= timeout) or now - last >= patience:
                    break
                with self._changed:
                    self._changed.wait(LOOK)
            if self._nodes.first:
                self._nodes.end()
        except RankLost as error:
            log.debug("the uploader cannot ask the other nodes: %s", error)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread; what it was sending is continued by the next start."""
        self._stop.set()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LEAVE)
        _running.discard(self)

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finished(self) -> bool:
        if not self._nodes.first:
            return self._nodes.ended(self._obeyed)
        return self._looked == self._wanted

    @property
    def waiting(self) -> int:
        """Steps that are still to go to the store, as the first rank has seen at its last look; 0 elsewhere."""
        return self._backlog.waiting if self._alive() else 0

    # The thread

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        turn = self._lead if self._nodes.first else self._follow
        while not self._stop.is_set():
            try:
                turn()
            except _Stopped:
                break
            except RankLost as error:
                log.warning("uploads to %s end with the process group: %s", self._store.root, error)
                break
            except (HoldfastError, OSError) as error:
                self._outage.failed(error)
            except Exception as error:  # noqa: BLE001 - a fault of ours: it must be seen, and must not end training
                if self._stop.is_set():  # an interpreter that ends takes the pools of threads away
                    log.debug("an upload broke off: %s", error)
                else:
                    log.exception("uploads to %s end; steps stay on the fast tier", self._store.root)
                break
        with self._changed:
            self._changed.notify_all()

    def _progress(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._sent += nbytes
        self._moved = time.monotonic()

    # On the first rank

    def _lead(self) -> None:
        wanted = self._wanted
        step = self._backlog.next()
        if step is None:
            self._outage.ended()
            with self._changed:
                self._looked = wanted
                self._changed.notify_all()
                # For ever, if there is nothing to do: `stop` ends it.
                self._changed.wait_for(lambda: self._wanted != wanted or self._stop.is_set())
            return
        try:
            self._show(step)
            record = read_manifest(self._fast.path(step))
            self._bring(step, record)
        except (Damaged, Unsupported, NotACheckpoint) as error:
            self._backlog.give_up(step, error)
        finally:
            self.current = None
        self._show(None)

    def _show(self, step: int | None) -> None:
        self.current = step
        self._nodes.show(step)

    def _bring(self, step: int, record: Manifest) -> None:
        began, target = time.monotonic(), self._store.path(step)
        lender = lender_of(step, record, self._store, self._backlog.look())
        number = self._nodes.order(name=target.name, save=record.save, lender=lender)
        try:
            into = as_stored(target.name, record, self._store.root, lender)
            self._send(target.name, record, into)
            self._await_others(number)
            self._progress(0)  # who has been stopped commits nothing
            self._check(target, record, into)
            target.make_folder()
            signed = found_signature(self._fast.root / target.name, record)
            commit(target, into, replaces=self._backlog.replaces(step), signed=signed)
        except StorageError as error:
            if error.errno == errno.EEXIST:  # a step or file of another run
                raise Unsupported(str(error)) from error
            raise
        finally:
            self._nodes.forget(number)
        self._backlog.done(step, record)
        self._outage.ended()
        nbytes = sum(file.bytes for file in record.data_files)
        log.info("step %d is in the store: %d bytes in %.1f s, %s", step, nbytes, time.monotonic() - began, target)
        self.current = None
        self._sweep(step)

    def _sweep(self, step: int) -> None:
        """Both tiers have a step more: on the fast one what was held for its sake may go."""
        fast = self._fast.committed()
        # What is half there may be continued as long as the fast tier has it.
        self._store.sweep(self._options.keep, step, {self._store.path(other) for other in fast})
        kept = self._fast.kept(self._options.keep_fast)
        if kept is not None and fast:
            kept = kept.and_whole(self._backlog.held(fast))
            self._fast.retire(kept, max(fast))
            self._nodes.order(kept=kept, upto=max(fast))

    def _await_others(self, number: int) -> None:
        watch, began, followers = (
            Watch(self._nodes.signs, self._options.deadline),
            time.monotonic(),
            self._nodes.followers,
        )
        while len(reports := self._nodes.reports(number)) < len(followers):
            missing = [leader for leader in followers if leader not in reports]
            watch.expect(missing, began)
            lost = self._nodes.silent(missing, watch)
            if lost:
                raise HoldfastError(
                    f"rank {lost[0]}, which uploads what its node has, has made no progress for {watch.deadline:g} s"
                )
            if self._stop.wait(LOOK):
                raise _Stopped
        self._moved = time.monotonic()
        failed = [f"rank {leader}: {text}" for leader, text in reports.items() if text]
        if failed:
            damaged = any(text.startswith(Damaged.__name__) for text in reports.values())
            raise (Damaged if damaged else HoldfastError)("; ".join(failed))

    def _check(self, target: Place, record: Manifest, into: Manifest) -> None:
        files, absent = into.data_files, lacking_files(target, into)
        lacking = [files[index].path for index in absent]
        if into.attachments:
            there = target.sizes_below()
            lacking += [path for path, nbytes, _ in into.attachments if there.get(path) != nbytes]
        if lacking:
            # Another process may have swept the store; a file that no node has does not come by trying.
            self._attempts[into.save] = self._attempts.get(into.save, 0) + 1
            here = lacking_files(self._fast.root / target.name, record)  # of the same files, in the same order
            alone = not self._nodes.followers and any(index in here for index in absent)
            gone = alone or self._attempts[into.save] >= ATTEMPTS
            text = f"{len(lacking)} of its files came from no node, {lacking[0]} for one"
            raise (Damaged if gone else HoldfastError)(text)

    # On every leader

    def _send(self, name: str, record: Manifest, into: Manifest) -> None:
        """Send the files that this node has and the store lacks."""
        source = self._fast.root / name
        absent = lacking_files(source, record)
        here = {own_path(file.path) for index, file in enumerate(record.data_files) if index not in absent}
        if self._nodes.first:
            here |= {path for path, _, _ in into.attachments}
        target, before = self._store.root / name, self._sent
        uploading = begin("upload", target, self._nodes.leader, whole=True, step=record.step)
        failed: BaseException | None = None
        try:
            copy_files(source, self._into / name, record, into=into, only=here.__contains__, progress=self._progress)
        except BaseException as error:
            failed = None if isinstance(error, _Stopped) else error  # the next start goes on with it
            raise
        finally:
            uploading.nbytes = self._sent - before
            uploading.end(failed)

    def _follow(self) -> None:
        order = self._nodes.ordered()
        if order is None:
            self._stop.wait(LOOK)
            return
        if order.kept is not None:
            self._fast.retire(order.kept, order.upto)
        if order.name:
            self._nodes.report(order.number, self._obey(order))
        self._obeyed = order.number

    def _obey(self, order: Instruction) -> str:
        """Do what was ordered; why it failed, if it did."""
        try:
            record = self._ordered(order)
            if record is not None:
                self.current = record.step
                with at_work(self._nodes.signs, self._nodes.leader, self._options.deadline, lambda: self._sent):
                    self._send(order.name, record, as_stored(order.name, record, self._store.root, order.lender))
        except (HoldfastError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.current = None
        return ""

    def _ordered(self, order: Instruction) -> Manifest | None:
        """The manifest of what was ordered; None if this node has nothing of it."""
        path, until = self._fast.root / order.name, time.monotonic() + NEWS
        while True:
            try:
                record = read_manifest(path)
                if record.save == order.save:
                    return record
            except NotACheckpoint:
                pass
            # The order may have been faster than the news of the commit.
            here = any(datafile.save_of(file) for file in path.files_below())  # links keep their older names
            if not here or time.monotonic() > until:
                return None
            if self._stop.wait(LOOK / 4):
                raise _Stopped


class _Stopped(Exception):
    """The thread is to end."""


_running: weakref.WeakSet[Uploader] = weakref.WeakSet()


def running() -> list[Uploader]:
    """The uploaders of this process."""
    return list(_running)


def _stop_all() -> None:
    """An interpreter that ends does not wait for uploads: the next start continues them."""
    for uploader in list(_running):
        uploader.stop()


# Pools of threads, as uploads have them, are joined before the handlers of `atexit` run.
getattr(threading, "_register_atexit")(_stop_all)  # noqa: B009
