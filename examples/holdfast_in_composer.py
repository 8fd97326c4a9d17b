"""A callback for MosaicML Composer: saves with a CheckpointManager, and resumes from the newest whole step.

trainer = Trainer(model=model, ..., callbacks=[HoldfastSaver("runs/1", every=500)])  # no save_folder, no autoresume
"""

from datetime import timedelta
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

import holdfast


class Progress:
    """Composer's timestamp, in plain values."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        times = self.state.timestamp.state_dict()
        return {name: time.total_seconds() if isinstance(time, timedelta) else time for name, time in times.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        times = {name: timedelta(seconds=time) if name.endswith("_wct") else time for name, time in saved.items()}
        self.state.timestamp.load_state_dict(times)


class HoldfastSaver(Callback):
    """Saves every so many batches below ``root``, and goes on from the newest whole step there."""

    def __init__(self, root: str, every: int) -> None:
        self.root, self.every = root, every
        self.manager: holdfast.CheckpointManager | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        self.manager = holdfast.CheckpointManager(self.root, every=self.every)
        self.live = {
            "model": state.model,
            "optimizers": list(state.optimizers),
            "schedulers": list(state.schedulers),
            "scaler": state.scaler,
            "timestamp": Progress(state),
            "rng": holdfast.RNG(),
        }
        self.resuming = self.manager.restore(self.live) is not None
        self.to_skip = int(state.timestamp.batch_in_epoch)  # batches that Composer reads once more and drops

    def epoch_start(self, state: State, logger: Logger) -> None:
        self.resume_draws()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self.resume_draws()
        self.to_skip -= 1

    def resume_draws(self) -> None:
        if self.resuming and self.to_skip == 0:  # Composer has set all seeds anew, and drawn from them
            self.live["rng"].rewind()
            self.resuming = False

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self.manager.step(int(state.timestamp.batch), self.live)
        if self.manager.should_stop:  # SIGTERM: all ranks have the same last step
            state.stop_training()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.manager.save(int(state.timestamp.batch), self.live)

    def close(self, state: State, logger: Logger) -> None:
        if self.manager is not None:
            self.manager.close()
