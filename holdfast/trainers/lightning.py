"""PyTorch Lightning: `HoldfastCheckpoint`, a callback that saves and restores a `Trainer`'s whole state.

Lightning's own checkpoints are left alone; `lightning_io.py` is the plugin that writes those.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.load import Loaded
from holdfast.manager import CheckpointManager
from holdfast.run.options import ResumeOptions, RhythmOptions
from holdfast.run.steps import Steps
from holdfast.saving.options import takes, values_of
from holdfast.state.per_rank import Elsewhere
from holdfast.storage.urls import location
from holdfast.trainers.lightning_io import HoldfastCheckpointIO
from holdfast.trainers.lightning_steps import leave_steps, newest, take_steps
from holdfast.trainers.old_steps import refuse_old_steps

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise ImportError("holdfast.trainers.lightning needs Lightning: pip install lightning") from error

import holdfast

__all__ = ["HoldfastCheckpoint", "HoldfastCheckpointIO"]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(RhythmOptions, ResumeOptions):
    """What `HoldfastCheckpoint` takes. Steps are those of the optimizer."""

    resume: bool = True
    """False starts from scratch, in a root without steps."""

    elsewhere: Elsewhere = "error"
    """What a loader and a datamodule get on another number of ranks, as of `holdfast.PerRank`."""

    monitor: str | None = None
    """The name of the logged metric that ``Keep(best=…)`` compares."""


class HoldfastCheckpoint(Checkpoint):
    """Saves the state of a run every ``every`` steps of its optimizers below ``root``, and goes on from there.

        trainer = pl.Trainer(callbacks=[HoldfastCheckpoint("/ckpt/run1", every=500)])
        trainer.fit(model, datamodule)      # the same line starts a run and goes on with it

    One device, DDP, FSDP and `ModelParallelStrategy` (FSDP2, tensor parallelism): each rank saves what it holds, and
    the run may go on on another number of ranks. Saved are the module, the optimizers, the schedulers, the progress of
    all loops, the positions of loaders that have a ``state_dict`` (`torchdata.StatefulDataLoader`), the states of the
    callbacks, of the datamodule and of the precision plugin, what ``on_save_checkpoint`` hooks add, and the generators.

    Takes the options of `CheckpointOptions` as keywords: all those of `holdfast.CheckpointManager` and of its
    `restore`. The manager is there as ``manager`` while `fit` runs. A ``fast_dev_run`` neither restores nor saves. With
    this callback Lightning adds no `ModelCheckpoint` of its own.

    ``ckpt_path=`` of `validate`, `test` and `predict` may be the folder of a step, or ``"best"``. Of the step it takes
    the module's weights, which each rank reads as it holds them, and what hooks and callbacks restore from.

    A step that ends an epoch is saved once the epoch has ended, with what validation and schedulers did then. After a
    SIGTERM or SIGUSR1 the last step is saved, and `fit` ends.
    """

    @takes(CheckpointOptions)
    def __init__(self, options: CheckpointOptions) -> None:
        super().__init__()
        self._options = options
        self.resume, self.elsewhere, self.monitor = options.resume, options.elsewhere, options.monitor
        self.manager: CheckpointManager | None = None
        self.loaded: Loaded | None = None
        """What the last `fit` went on from; None if it started from scratch."""
        self._state: dict[str, Any] = {}
        self._rng = holdfast.RNG()
        self._loaders: _Loaders
        self._last_step = 0
        self._ends_epoch = False

    @property
    def best_model_path(self) -> str:
        """The committed step in ``root`` with the best ``monitor``; without one the newest. Empty if there is none.

        Which is better says the ``mode`` of ``keep``. Looks at the disk; as `trainer.validate(ckpt_path="best")` does.
        """
        steps = self._steps()
        path = steps.best(self._options.keep.mode) if self.monitor is not None else newest(steps)
        return "" if path is None else str(path)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of the step at `best_model_path`; None if it has none."""
        steps = self._steps()
        path = steps.best(self._options.keep.mode) if self.monitor is not None else None
        return None if path is None else torch.tensor(steps.metric(path))

    @property
    def last_model_path(self) -> str:
        """The newest committed step in ``root``. Empty if there is none."""
        path = newest(self._steps())
        return "" if path is None else str(path)

    def _steps(self) -> Steps:
        return Steps(location(self._options.root), self._options.name)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        take_steps(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
            raise Unsupported(
                "HoldfastCheckpoint does not know how Lightning's DeepSpeedStrategy keeps its optimizer: use "
                "holdfast.trainers.deepspeed with an engine of your own, or another strategy"
            )
        self.loaded = None
        if getattr(trainer, "fast_dev_run", False):
            return  # a trial of the code: a run that begins later must not go on from it
        # The group of ranks exists once the strategy is set up.
        self.manager = CheckpointManager(**values_of(self._options, RhythmOptions))
        self._state = self._state_of(trainer)
        self.loaded = self._restore(self.manager)
        self._last_step, self._ends_epoch = trainer.global_step, False
        if self.loaded is not None:
            self._last_step = self._state["step"]

    def _restore(self, manager: CheckpointManager) -> Loaded | None:
        if not self.resume:
            refuse_old_steps(manager, "resume=False")
            return None
        try:
            return manager.restore(self._state, **values_of(self._options, ResumeOptions))
        except Mismatch as error:
            if "elsewhere" not in str(error):
                raise
            raise Mismatch(
                f'{error}. Here it is HoldfastCheckpoint that takes elsewhere="first", or a function'
            ) from error

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.loaded is None:
            return
        if trainer.ckpt_path:  # put over what was restored, and only now it is known for every strategy
            raise ValueError(
                f"HoldfastCheckpoint has restored step {self.loaded.step} from {self.loaded.checkpoint.path}, and "
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) another state over it: leave out ckpt_path, or give "
                "HoldfastCheckpoint a root without steps"
            )
        # Lightning has just made its loaders and their iterators, in an order of its own: samplers hear of the epoch
        # too late for an epoch that was begun, and generators were drawn from. So they are made once more.
        loop, inside, positions = trainer.fit_loop, self._state["inside_of_epoch"], self._loaders.positions
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        assert combined is not None and fetcher is not None
        for loader in combined.flattened:
            _set_sampler_epoch(loader, trainer.current_epoch)
        if positions:
            combined._load_state_dicts(positions)
            iter(fetcher)
            if not inside:
                for iterator in getattr(combined._iterator, "iterators", ()):
                    next(iterator, None)  # the end, which was not read yet
        self._rng.rewind()
        if not inside:
            iter(fetcher)
            loop.epoch_loop.restarting = False  # else it would take the epoch before for one to be ended
            if loop.restarted_on_epoch_start:
                loop.epoch_progress.current.ready += 1  # the epoch that begins, which it does not count again

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._ends_epoch = True
        else:
            self._step(trainer, inside_of_epoch=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here and not at the end of the epoch before: schedulers that watch a metric have now made their step. What
        # Lightning does next is to count the batches of this epoch from zero, which the saved state has to show.
        if self._ends_epoch:
            self._ends_epoch = False
            self._step(trainer, inside_of_epoch=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In an epoch that was gone on with Lightning would let schedulers that watch a metric miss their step.
        trainer.fit_loop._restarting = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_now(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.manager is None:
            return
        if isinstance(exception, SIGTERMException):  # on all ranks, after the same batch
            self._save_now(trainer)
        manager, self.manager = self.manager, None
        trainer._signal_connector.teardown()  # so that the manager finds its own handlers, and gives them back too
        manager.__exit__(type(exception))  # closes it; what ended training is to be seen, so a failed save is logged

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # After Lightning has given back the signals: the manager then finds its own handlers, and gives them back too.
        leave_steps(trainer)
        manager, self.manager, self._state = self.manager, None, {}
        if manager is not None:
            manager.close()

    def _step(self, trainer: pl.Trainer, *, inside_of_epoch: bool) -> None:
        if self.manager is None or trainer.global_step == self._last_step:
            return  # gradients are accumulated: no optimizer has made a step
        self._last_step = trainer.global_step
        self._note(trainer, inside_of_epoch=inside_of_epoch)
        self.manager.step(self._last_step, self._state, metric=self._metric(trainer))
        if self.manager.should_stop:
            trainer.should_stop = True

    def _save_now(self, trainer: pl.Trainer) -> None:
        if self.manager is not None and trainer.global_step:
            self._note(trainer, inside_of_epoch=not trainer.fit_loop.epoch_loop._num_ready_batches_reached())
            self.manager.save(trainer.global_step, self._state, metric=self._metric(trainer))

    def _note(self, trainer: pl.Trainer, *, inside_of_epoch: bool) -> None:
        if not inside_of_epoch:
            epoch = trainer.fit_loop.epoch_loop
            epoch.batch_progress.reset_on_run()
            epoch.scheduler_progress.reset_on_run()
            epoch.automatic_optimization.optim_progress.reset_on_run()
            epoch.val_loop.batch_progress.total.reset()
        self._state.update(step=trainer.global_step, epoch=trainer.current_epoch, inside_of_epoch=inside_of_epoch)

    def _metric(self, trainer: pl.Trainer) -> float | None:
        value = trainer.callback_metrics.get(self.monitor) if self.monitor is not None else None
        return None if value is None else float(value)

    def _state_of(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Everything of a trainer that is to go on, as the live objects."""
        optimizers, self._loaders = trainer.optimizers, _Loaders(trainer)
        state: dict[str, Any] = {
            "model": trainer.strategy.model,
            "optimizer": optimizers[0] if len(optimizers) == 1 else {str(i): o for i, o in enumerate(optimizers)},
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "loops": _Loops(trainer),
            "loaders": holdfast.PerRank(self._loaders, self.elsewhere),
            "callbacks": holdfast.PerRank(_Callbacks(trainer), "first"),
            "rng": self._rng,
            "step": 0,
            "epoch": 0,
            "inside_of_epoch": False,
        }
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            state["datamodule"] = holdfast.PerRank(datamodule, self.elsewhere)
        return state


class _Loops:
    """The progress of all loops, but for the positions of the loaders, which differ by rank."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer._checkpoint_connector._get_loops_state_dict()
        loops["fit_loop"]["state_dict"].pop("combined_loader", None)
        return loops

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])


class _Loaders:
    """The positions of the training loaders that have one; what was loaded is kept until Lightning has made them."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.positions: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        loader = self._trainer.fit_loop._combined_loader
        return {"loaders": loader._state_dicts() if loader is not None else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions = state["loaders"]


class _Callbacks:
    """The states of callbacks, and what hooks of callbacks and of the module add to a checkpoint."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _frame(self) -> dict[str, Any]:
        """What hooks find of a checkpoint of Lightning's, without the tensors."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": version("lightning"),
            "callbacks": call._call_callbacks_state_dict(trainer),
        }

    def state_dict(self) -> dict[str, Any]:
        frame = self._frame()
        call._call_callbacks_on_save_checkpoint(self._trainer, frame)
        call._call_lightning_module_hook(self._trainer, "on_save_checkpoint", frame)
        return frame

    def load_state_dict(self, state: dict[str, Any]) -> None:
        call._call_lightning_module_hook(self._trainer, "on_load_checkpoint", state)
        call._call_callbacks_on_load_checkpoint(self._trainer, state)
        call._call_callbacks_load_state_dict(self._trainer, state)
