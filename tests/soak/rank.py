"""One rank of an episode: restores, says what it found, trains and saves, says how each save ended, closes.

Forked by `world`. It tells everything through a pipe, as lines of JSON, and waits for words of the program as files of
the folder ``words``. Judges nothing but its own memory.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
import holdfast.saver
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from holdfast.write import pool
from tests.soak import faults
from tests.soak.content import State
from tests.soak.plan import Episode, metric_of

LOST = 3
"""Exit status of a rank that ends because another rank did not come."""

ATTEMPTS = 3
"""How often the last save is tried when no fault is left and only the machine is slow."""


def homes(base: Path, episode: Episode) -> dict[str, Any]:
    """Where the checkpoints of a run lie, as arguments of the manager."""
    if episode.run.tiers:
        return {"root": StorePlace(Local(base / "store"), "run"), "fast": base / "root"}
    return {"root": base / "root"}


def manager_of(base: Path, episode: Episode, **options: Any) -> holdfast.CheckpointManager:
    arguments: dict[str, Any] = {
        **homes(base, episode),
        "every": episode.every,
        "keep": episode.keep,
        **episode.manager,
    }
    if episode.run.tiers:
        arguments |= {"upload": episode.upload, "keep_fast": episode.keep_fast}
    return holdfast.CheckpointManager(**{**arguments, **options})


class Rank:
    """One trainer of an episode."""

    def __init__(self, episode: Episode, rank: int, base: Path, words: Path, told: int) -> None:
        self.episode, self.rank, self.base, self.words, self._told = episode, rank, base, words, told
        self._alone = False  # another rank is known to be gone
        start = pool.start

        def started(kind: str) -> Any:
            worker = start(kind)
            if kind == "process":
                self.tell("writer", worker.pid)
            return worker

        pool.start = started

    def tell(self, kind: str, *what: object) -> None:
        line = json.dumps([kind, self.rank, *what]).encode()
        os.write(
            self._told, line[:4000] + b"\n" if len(line) < 4000 else json.dumps([kind, self.rank]).encode() + b"\n"
        )

    def await_word(self, word: str) -> None:
        while not (self.words / word).exists():
            time.sleep(0.003)

    def live(self, port: int) -> int:
        """All of it; the exit status."""
        episode = self.episode
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=episode.world)
        state = State(episode)
        before = _held()
        signals = (signal.SIGTERM,) if episode.fault.kind == "signal" else ()
        manager = manager_of(self.base, episode, signals=signals)
        manager.prepare(state.tree)
        try:
            loaded = manager.restore(state.tree)
        except holdfast.errors.RankLost as error:
            self.tell("lost", "restore", str(error))
            return LOST
        if loaded is None:
            self.tell("restored", None)
        else:
            wrong = state.faults(loaded.checkpoint.world_size)
            mark = state.tree["episode"], state.tree["step"]
            self.tell("restored", loaded.step, mark, wrong, loaded.bytes_unverified, str(loaded.checkpoint.path))
        self.await_word("train")
        step = loaded.step if loaded is not None and loaded.step is not None else 0
        faults.watch(self, episode, step)
        last = self._train(manager, state, step)
        if last is None:
            return LOST
        if not manager.should_stop:
            self.tell("trained")
            self.await_word("healed")
            faults.heal()
            last = self._save_last(manager, state, last + 1)
        try:
            manager.close()
        except holdfast.SaveFailed as error:
            self.tell("failed", 0, _failure(error))
        safe = [s for s in manager.steps() if manager.durability(s).store] if episode.run.tiers else []
        if last is None:
            return LOST
        self.tell("ended", last, safe, _left_behind(before)[:8])  # a longer line is cut
        return 0

    def _train(self, manager: holdfast.CheckpointManager, state: State, step: int) -> int | None:
        """The step that was reached; None if another rank is gone."""
        episode = self.episode
        for step in range(step + 1, step + episode.steps + 1):
            state.advance(step)
            self.tell("step", step)
            if step % episode.every == 0 or episode.fault.kind == "signal":
                self.tell("saving", step)
            try:
                saving = manager.step(step, state.tree, metric=metric_of(step))
                if saving is not None and saving.step == step:
                    self._follow(saving)
            except holdfast.SaveFailed as error:
                self.tell("raised", step, _failure(error))
                if self._is_gone(error):
                    return None
            if self._alone:
                return None
            if manager.should_stop:
                return step
            if episode.run.tiers and self.rank == 0 and episode.fault.kind != "disk":
                self.tell("safe", [s for s in manager.steps() if manager.durability(s).store])
            time.sleep(episode.pause)
        return step

    def _follow(self, saving: holdfast.Saving) -> None:
        step = saving.step

        def ended(done: holdfast.Saving) -> None:
            if done.skipped:
                self.tell("skipped", step)
            elif done.failed is not None:
                self.tell("failed", step, _failure(done.failed))
                self._alone = self._alone or self._is_gone(done.failed)
            else:
                self.tell("done", step)

        self.tell("begun", step)
        saving.add_done_callback(ended)

    def _is_gone(self, error: BaseException) -> bool:
        """Whether the failure is that a rank was killed: then training ends, as its collectives would."""
        fault = self.episode.fault
        kills = fault.kind == "kill" or (fault.kind == "freeze" and fault.then == "kill")
        return isinstance(error, holdfast.errors.RankLost) and kills

    def _save_last(self, manager: holdfast.CheckpointManager, state: State, step: int) -> int | None:
        """Every fault is over: this save succeeds, unless a rank is gone."""
        state.advance(step)
        self.tell("saving", step)
        for attempt in range(ATTEMPTS):
            try:
                manager.save(step, state.tree, metric=metric_of(step))
                self.tell("done", step)
                return step
            except holdfast.SaveFailed as error:
                self.tell("failed", step, _failure(error))
                if self._is_gone(error) or attempt == ATTEMPTS - 1:
                    if not isinstance(error, holdfast.errors.RankLost):
                        raise
                    return None
        return None


def _failure(error: BaseException) -> dict[str, Any]:
    return {
        "lost": isinstance(error, holdfast.errors.RankLost), "settled": getattr(error, "settled", True),
        "text": str(error)[:600],
    }  # fmt: skip


def _held() -> tuple[list[str], list[str]]:
    """What this process holds open, and the names of its threads."""
    gc.collect()
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}").removesuffix(" (deleted)"))
        except OSError:  # that of the listing itself
            continue
    return sorted(found), sorted(thread.name for thread in threading.enumerate())


def _left_behind(before: tuple[list[str], list[str]]) -> list[str]:
    """Files and threads that a closed manager still holds; a moment is allowed for threads to end."""
    until = time.monotonic() + 10
    while True:
        files, threads = _held()
        more = [
            f for f in files if files.count(f) > before[0].count(f) and not f.startswith(("socket:", "anon_inode:"))
        ]
        more += [f"thread {t}" for t in threads if threads.count(t) > before[1].count(t)]
        if not more or time.monotonic() > until:
            return more
        time.sleep(0.02)


def serve(episode: Episode, rank: int, base: Path, words: Path, told: int, port: int) -> None:
    """The life of a forked rank; never returns."""
    os.setpgid(0, 0)  # a launcher kills the whole group of a trainer, so do the faults
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(words / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s", force=True
    )
    logging.getLogger("holdfast").setLevel(logging.DEBUG)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    logging.raiseExceptions = False  # the log is a file too, and files may be limited
    one = Rank(episode, rank, base, words, told)
    code = 4
    try:
        code = one.live(port)
    except BaseException as error:
        one.tell("crashed", f"{type(error).__name__}: {error}"[:1500])
        with suppress(OSError):
            traceback.print_exc()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
