"""The options of a run: what the manager takes, and what the integrations of trainers hand on to it.

Each option has its name, type, default and documentation here, or in `saving.options` if a `Saver` takes it too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from holdfast.load import Options as LoadOptions
from holdfast.ondisk.arguments import GRACE, PATH, PATTERNS, SIGNALS, Takes, check, one_of, or_none, whole
from holdfast.ondisk.patterns import Patterns, patterns_in
from holdfast.policies.signing.keys import Keys
from holdfast.run.interval import check_mtbf
from holdfast.run.keep import Keep
from holdfast.saving.options import SaverOptions
from holdfast.storage.place import Place
from holdfast.storage.uploads import Upload

_TAKES = {
    "root": PATH, "fast": or_none(PATH), "poll": whole(1), "grace": GRACE, "signals": SIGNALS,
    "on_failure": one_of("raise", "warn"),
    "upload": Takes("holdfast.storage.Upload(…)", lambda value: isinstance(value, Upload)),
}  # fmt: skip

_OF_LOAD = (
    "missing=, rename= and cast= are options of holdfast.load(STEP, state, …), which loads one step; restore does not "
    "take them"
)


def _as_keep(given: object) -> str:
    """What was meant by something that is no `Keep`, as far as it can be told."""
    if isinstance(given, int):
        return f"holdfast.Keep(last={given})"
    if isinstance(given, dict):
        return f"holdfast.Keep({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    return "rules, such as holdfast.Keep(last=3)"


@dataclass(frozen=True, kw_only=True)
class RunOptions(SaverOptions):
    """Where the steps of a run are saved and what is kept of them."""

    root: str | os.PathLike[str] | Place = field(kw_only=False)
    """The folder of the run, a path or a URL. One run, one root."""

    keep: Keep = Keep()
    """Which committed steps stay in ``root``."""

    name: str = "step-{step:09d}"
    """The name of a step's folder, with ``{step}`` in it."""

    fast: str | os.PathLike[str] | None = None
    """A folder on local disk, of each node or shared by all, in which every save is committed first. A thread then
    uploads to ``root``. See docs/tiers.md."""

    upload: Upload = Upload()
    """Which steps go from ``fast`` to ``root``."""

    keep_fast: Keep = Keep(last=2)
    """Which committed steps stay in ``fast``."""

    incremental: bool = False
    """Write what has changed since the last save, or since the step that was restored, and reuse the files of the rest.
    Each step stays a whole checkpoint, and any may be deleted. See docs/incremental.md."""

    files: Mapping[str, str | os.PathLike[str] | bytes] | None = None
    """Files to keep beside the state of each step: by name, from a path or from bytes."""

    on_failure: Literal["raise", "warn"] = "raise"
    """``"raise"`` a save that failed in a later `step`, the same one on all ranks, or only ``"warn"`` in the log."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    """Signals that ask for one last save. The first rank to get one tells the others; all end with the same step on
    disk, and `should_stop` turns true everywhere. A save that was under way at the signal is that last one."""

    grace: float = 25.0
    """Seconds that any wait may last after a SIGTERM, so that a save that cannot finish says so before the launcher
    kills the process (torchrun and Kubernetes do after 30)."""

    poll: int = 1
    """Steps between two looks of a rank at what the other ranks have to tell, such as a signal."""

    mtbf: float | None = None
    """The mean time between failures in seconds. The best interval is then logged at debug level; see `advice`."""

    journal: bool = True
    """Keep a journal of the saves in ``root/.journal``, which `holdfast watch` and the page of a run show. A save never
    waits for it, nor fails. See docs/view.md."""

    def __post_init__(self) -> None:
        for name, given in (("keep", self.keep), ("keep_fast", self.keep_fast)):
            Takes(_as_keep(given), lambda value: isinstance(value, Keep)).check(name, given)
        check(_TAKES, vars(self))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RhythmOptions(RunOptions):
    """A run whose rhythm is given in steps."""

    every: int
    """Save every so many steps."""


@dataclass(frozen=True, kw_only=True)
class ManagerOptions(RhythmOptions):
    """What `CheckpointManager` takes. All ranks give the same options."""

    group: dist.ProcessGroup | None = None
    """The ranks that save: by default those of the default process group, or this process alone without one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1).check("every", self.every)
        if self.degraded and self.fast is not None:
            raise ValueError("degraded=True is for saves that go straight to root: leave out fast=")
        if self.incremental and self.sign is not None:
            raise ValueError(
                "an incremental save cannot be signed: the files that it reuses are not its own (docs/security.md)"
            )
        if self.mtbf is not None:
            check_mtbf(self.mtbf)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Which steps a run may go on from."""

    step: int | Literal["best"] | None = None
    """Go back to this step, or to the ``"best"`` by its metric, in the place of the newest. No other is tried. Training
    goes on from there: with the first save after it the later steps no longer count. See docs/resume.md."""

    run: str | None = None
    """The id of the run that the step has to belong to, or ``"any"``. Without it, Mismatch is raised if a step of
    another run was saved after the newest one by number. See docs/resume.md."""

    other_model: bool = False
    """Load a checkpoint of another model too; see `load`."""

    require: Keys | None = None
    """Public keys: only a step that one of them has signed is loaded. If there is no other, Untrusted is raised."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.step, int) and not isinstance(self.step, bool) and self.step >= 0
        if self.step not in (None, "best") and not is_number:
            raise ValueError(f'step={self.step!r} is the number of a step, or "best"')

    @property
    def of_run(self) -> str | None:
        """The one run that the step has to belong to."""
        return None if self.run == "any" else self.run


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(ResumeOptions):
    """What `CheckpointManager.restore` takes."""

    only: Patterns = "*"
    """Load these parts of the state alone; see `load`. Then the newest step is taken, even if it has lost sections."""

    @property
    def complete(self) -> bool:
        """Whether a step that has lost sections is only taken if there is no other."""
        return self.only == "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        PATTERNS.check("only", self.only)

    @property
    def of_load(self) -> LoadOptions:
        """What is asked of the load of one step."""
        return LoadOptions(self.only, run=self.of_run, other_model=self.other_model, advice=_OF_LOAD)

    def check(self) -> bool:
        """Raise Mismatch if nothing is asked for. Called in an exchange, so that all ranks raise it."""
        return bool(patterns_in(self.only))
