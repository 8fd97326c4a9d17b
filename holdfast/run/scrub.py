"""Scrubbing: the committed steps of a run checked in the background, slowly, and mended where they can be.

`CheckpointManager.scrub` starts one. Never reads while a save is under way, and never takes a step that retention has
just deleted for a damaged one.

We rejected a process of its own. On Linux a thread has its own priorities, sums and reads release the GIL, and a thread
knows when a save is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from time import monotonic

import msgspec

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.formats.own import Own, read_manifest
from holdfast.ondisk.manifest import FILE_NAME, Manifest
from holdfast.read.damage import Damage, Findings, damages, tensors_hit
from holdfast.read.examine import examine
from holdfast.read.files import DataFiles
from holdfast.read.source import ReadStats
from holdfast.repair.repair import Source, mended_of
from holdfast.run.steps import Steps
from holdfast.storage.background import Pace, Stopped, lower_priority
from holdfast.storage.place import Place

NOTE = ".holdfast-scrub.json"
"""In the root, beside the steps: what was checked when, and what came of it."""

RATE = 100e6
"""Bytes a second, unless another rate is given."""

NAMED = 12
"""Names of tensors in a warning at the most."""


class Checked(msgspec.Struct, frozen=True):
    """What scrubbing found of one step: ``whole`` then, with so many ``mended`` bytes; else the ``tensors`` hit.

    ``checked`` is when, in RFC 3339; ``faults`` tell what is wrong. A step without tensors hit may still lack values
    or attachments.
    """

    step: int
    save: str
    checked: str
    whole: bool
    mended: int = 0
    tensors: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class _Note(msgspec.Struct):
    steps: dict[str, Checked] = {}


def sources_of(store: Steps, fast: Steps) -> Callable[[str], list[Place]]:
    """Where a damaged step of ``store`` finds its bytes again, by its name: in the fast tier, or in the other steps."""

    def sources(name: str) -> list[Place]:
        near = fast is not store and (fast.root / name / FILE_NAME).is_file()
        return [fast.root / name, store.root] if near else [store.root]

    return sources


class Scrubbing:
    """A scrubbing under way. With ``every`` it goes on until it is stopped, else it ends with the last step."""

    def __init__(
        self, steps: Steps | None, *, every: float | None, rate: float, repair: bool,
        sources: Callable[[str], Sequence[Source]], busy: Callable[[], bool],
    ) -> None:  # fmt: skip
        if every is not None and not every > 0:
            raise ValueError(f"every={every} must be more than 0 seconds")
        self._stop = threading.Event()
        self._pace = Pace(rate, busy, self._stop)
        self._every, self._repair, self._sources = every, repair, sources
        self._checked: dict[str, Checked] = {}
        self._failure: BaseException | None = None
        self._damaged: dict[str, str] = {}  # names of steps, with the save that was found damaged
        self._thread = None
        if steps is not None:
            self._thread = threading.Thread(target=self._run, args=(steps,), name="holdfast-scrub", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def checked(self) -> tuple[Checked, ...]:
        """What it has checked so far, newest step first."""
        return tuple(sorted(self._checked.values(), key=lambda one: -one.step))

    def damaged(self, root: Place) -> list[str]:
        """Names of steps that were found damaged, could not be mended, and have not been saved again since."""
        names = []
        for name, save in self._damaged.items():
            try:
                names += [name] if read_manifest(root / name).save == save else []
            except (NotACheckpoint, Damaged, Unsupported) as error:  # a restore passes it over anyway
                log.debug("%s: %s", name, error)
        return names

    def wait(self, timeout: float | None = None) -> tuple[Checked, ...]:
        """Wait for the end and tell what was checked. Raises TimeoutError, and what scrubbing itself failed of."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"scrubbing has not ended within {timeout} s")
        if self._failure is not None:
            raise self._failure
        return self.checked

    def stop(self, timeout: float | None = None) -> None:
        """Tell it to end, and wait until it has; what was checked is remembered."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, steps: Steps) -> None:
        lower_priority()
        try:
            while True:
                try:
                    self._pass(steps)
                except (HoldfastError, OSError) as error:
                    if self._every is None:
                        raise
                    log.warning("scrubbing %s is put off: %s", steps.root, error)
                if self._every is None or self._stop.wait(max(self._every / 10, 1.0)):
                    return
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            log.warning("scrubbing %s has ended: %s", steps.root, error)
            self._failure = error

    def _pass(self, steps: Steps) -> None:
        """All steps that were not checked of late, the newest first."""
        note = _read(steps.root)
        there = {path.name: (step, path) for step, path in steps.committed().items()}
        for name, (step, path) in reversed(there.items()):
            known = note.steps.get(name)
            try:
                record = read_manifest(path)
                if known is not None and known.save == record.save and self._is_fresh(known):
                    continue
                checked = self._check(step, path, record)
            except NotACheckpoint:  # deleted meanwhile
                continue
            except Damaged as error:
                log.warning("%s is damaged: %s", path, error)
                checked = Checked(step, "", _now(), False, faults=(str(error),))
            if checked is None:
                continue
            self._checked[name] = note.steps[name] = checked
            self._damaged = {n: save for n, save in self._damaged.items() if n != name}
            self._damaged |= {} if checked.whole else {name: checked.save}
            (steps.broken.discard if checked.whole else steps.broken.add)(name)
            note.steps = {name: one for name, one in note.steps.items() if name in there}
            (steps.root / NOTE).write_small(msgspec.json.encode(note))

    def _is_fresh(self, known: Checked) -> bool:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(known.checked)
        return self._every is not None and known.whole and age.total_seconds() < self._every

    def _check(self, step: int, path: Place, record: Manifest) -> Checked | None:
        """What there is to say of a step; None if it was deleted or replaced meanwhile."""
        began, reader, stats = monotonic(), Own(path), ReadStats()
        files = DataFiles(path, record.data_files)
        faults = examine(files, record, stats, pace=self._pace, threads=1, begin=lower_priority)
        findings = Findings(record.save, 0, stats.read, 0, faults, reader.altered_attachments())
        hurt: Sequence[Damage] = [*findings.others, *damages(record, faults, files.folder)]
        if hurt and not _is_still(path, record):
            return None
        if not hurt:
            log.debug("%s is whole", path)
            return Checked(step, record.save, _now(), True)
        nbytes = 0
        log.warning("%s is damaged: %s", path, _summary(tensors_hit(hurt, record), hurt))
        if self._repair:
            checkpoint = Checkpoint(path, reader=reader)
            done = mended_of(checkpoint, findings, self._sources(path.name), dry_run=False, began=began)
            hurt, nbytes = done.left, done.nbytes
            log.warning("%s: %d bytes were mended, %s", path, nbytes, "and it is whole" if done.whole else "not all")
        hit = tensors_hit(hurt, record)
        return Checked(step, record.save, _now(), not hurt, nbytes, hit, tuple(dict.fromkeys(d.what for d in hurt)))


def _summary(tensors: Sequence[str], hurt: Sequence[Damage]) -> str:
    more = f" and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
    hit = ", ".join(tensors[:NAMED]) + more
    return f"{hurt[0].what} (hits {hit})" if hit else hurt[0].what


def _is_still(path: Place, record: Manifest) -> bool:
    try:
        return read_manifest(path) == record
    except (NotACheckpoint, Damaged):
        return False


def _read(root: Place) -> _Note:
    try:
        return msgspec.json.decode((root / NOTE).read_small(), type=_Note)
    except (FileNotFoundError, StorageError, msgspec.MsgspecError) as error:
        log.debug("nothing is known of earlier scrubbing: %s", error)
        return _Note()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
