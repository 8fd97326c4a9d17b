"""The Hugging Face Trainer: `HoldfastCallback` saves and restores in the place of Trainer's own checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.load import Loaded, load
from holdfast.manager import CheckpointManager
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ondisk.patterns import Patterns
from holdfast.run.options import ResumeOptions, RunOptions
from holdfast.saving.options import takes, values_of
from holdfast.state import RNG, PerRank
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.trainers.batches import Draws
from holdfast.trainers.old_steps import refuse_old_steps

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME

    from holdfast.trainers.huggingface_best import (
        BestSaves,
        CallbackOptions,
        Retention,
        load_best,
        nothing_deleted_by,
        retention,
    )
    from holdfast.trainers.huggingface_hooks import HOOKED, Hooks, Progress, hook, states_of_callbacks
    from holdfast.trainers.huggingface_push import Pushes, refuse_to_push_steps
except ImportError as error:
    raise ImportError('holdfast.trainers.huggingface needs transformers: pip install "transformers[torch]"') from error


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Saves the whole state of a Trainer in the background, and lets ``trainer.train()`` go on where it was.

        trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), train_dataset=dataset)
        HoldfastCallback("/ckpt/run1", every=500).attach(trainer)
        trainer.train()  # goes on after the newest whole step of /ckpt/run1, if there is one

    Saved are model, optimizer, scheduler, gradient scaler, `TrainerState` with the states of callbacks, loss not yet
    logged, and the random generators of each rank; ``also`` adds objects or values of your own under their names. A
    step is saved after it was logged and evaluated; the last one of an epoch after the epoch was. The last step of the
    training is always saved.

    ``every`` optimizer steps; without it, whenever Trainer would have saved by itself (``save_strategy``,
    ``save_steps``), in place of that. ``metric`` of `Keep` is what an evaluation of the step gave for
    ``metric_for_best_model``, the loss if none is named. Takes the options of `CallbackOptions` as keywords: all those
    of `CheckpointManager` and of its `restore`. See docs/trainers-huggingface.md.
    """

    @takes(CallbackOptions)
    def __init__(self, options: CallbackOptions) -> None:
        if options.every is not None and options.every < 1:
            raise ValueError(f"every={options.every} must be at least 1, or None for Trainer's own save_strategy")
        self._options, self.every, self._also = options, options.every, dict(options.also or {})
        self.manager: CheckpointManager | None = None
        self.restored: Loaded | None = None
        self.should_stop = False
        self._trainer: Any = None
        self._pushes: Any = None
        self._asked = False  # by Trainer itself, since the last save
        self._event = ""
        self._metric: tuple[int, float] | None = None
        self._folder, self._expected = "", -1
        self._source: Place | None = None  # a step of another folder that this run begins from
        self._best: Place | None = None  # the best step of the state that was restored, if its folder has moved
        self._roots: list[Place] = []  # where saves go to comes first
        self._only_best, self._best_saves = False, BestSaves(None)
        self._rng: dict[str, Any] | None = None
        self._draws = Draws()
        self._progress = Progress(self._draws)

    def attach(self, trainer: Any) -> HoldfastCallback:
        """Take over the checkpoints of ``trainer``, a `transformers.Trainer`; returns the callback.

        Raises Unsupported if it is not one that can be resumed so, ValueError if its arguments ask for what only
        Trainer's own checkpoints give.
        """
        lacking = [name for name in HOOKED if not callable(getattr(trainer, name, None))]
        if not isinstance(trainer, Trainer) or lacking:
            raise Unsupported(
                f"{type(trainer).__qualname__} cannot be resumed by HoldfastCallback"
                f"{' (it has no ' + ', '.join(lacking) + ')' if lacking else ''}: it takes a transformers.Trainer"
            )
        if trainer.is_deepspeed_enabled:
            raise Unsupported(
                "a Trainer with DeepSpeed leaves its state to an engine that saves it itself: use Trainer's checkpoints"
            )
        retention(trainer.args, self._options)
        self._roots = [location(root) for root in (self._options.fast, self._options.root) if root is not None]
        refuse_to_push_steps(trainer.args, self._roots)
        if self._trainer is not None and self._trainer is not trainer:
            raise ValueError("this HoldfastCallback is attached to another Trainer already: make one for each")
        if self.every is None and str(trainer.args.save_strategy) in ("no", "SaveStrategy.NO"):
            raise ValueError('nothing says when to save: give every=, or a save_strategy other than "no"')
        if self._trainer is None:
            self._trainer = self._progress.trainer = trainer
            self._pushes = Pushes(trainer)
            hook(trainer, self._hooks())
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def _hooks(self) -> Hooks:
        return Hooks(
            train=self._train, finished=self._finished, asked_to_save=partial(setattr, self, "_asked", True),
            watch=self._draws.watch, is_ours=lambda path: path == self._folder, restore=self._restore,
            restore_rng=self._restore_rng, began=self._began, load_best=self._load_best,
        )  # fmt: skip

    def _train(self, train: Callable[..., Any], asked: Any) -> Any:
        self.should_stop, self.restored, self._rng, self._source, self._best = False, None, None, None, None
        kept = retention(self._trainer.args, self._options)
        self._only_best = kept.only_best
        with (
            self._manager_that(kept) as self.manager,
            TemporaryDirectory(prefix="holdfast-") as self._folder, nothing_deleted_by(self._trainer.args),
            ExitStack() as stack,
        ):  # fmt: skip
            stack.callback(self._pushes.end)
            loaded = self._find(asked)
            if loaded is None:
                return train(resume_from_checkpoint=asked)
            while True:
                self._expect(loaded)
                try:
                    return train(resume_from_checkpoint=self._folder)
                except _OlderStep as other:
                    log.warning("training goes on from step %s, as the one after it cannot be read", other.loaded.step)
                    loaded = other.loaded

    def _manager_that(self, kept: Retention) -> CheckpointManager:
        """Made when training begins: the group of ranks exists once Trainer has made it."""
        options = values_of(self._options, RunOptions)
        return CheckpointManager(**options | {"every": self.every or 1, "keep": kept.keep, "keep_fast": kept.keep_fast})

    @property
    def _running(self) -> CheckpointManager:
        if self.manager is None:
            raise RuntimeError("HoldfastCallback restores while trainer.train() runs, and never else")
        return self.manager

    def _find(self, asked: Any) -> Loaded | None:
        """What training goes on from: the run's newest step, or the step of another folder that ``asked`` names."""
        manager = self._running
        if asked is False:
            refuse_old_steps(manager, "train(resume_from_checkpoint=False)")
            return None
        wanted = location(asked) if isinstance(asked, (str, os.PathLike)) else None
        progress = {"trainer": PerRank(self._progress, elsewhere="first")}
        loaded = manager.restore(progress, only="trainer", **values_of(self._options, ResumeOptions))
        if wanted is None or not (wanted / FILE_NAME).is_file():
            return loaded
        if loaded is None:
            self._source = wanted
            return self._load(wanted, progress, only="trainer")
        if wanted.parent in self._roots and wanted.name != loaded.checkpoint.path.name:
            raise ValueError(
                f"train(resume_from_checkpoint={str(asked)!r}) asks for a step, and {manager.root} holds a later "
                f"one, {loaded.checkpoint.path.name}: move the later steps out of the way to go on from it, or give "
                "HoldfastCallback another root"
            )
        return loaded

    def _load(self, path: Place, into: dict[str, Any], *, only: Patterns) -> Loaded:
        options = self._options
        return load(
            path, into, only=only, deadline=options.deadline, require=options.require, run=options.of_run,
            other_model=options.other_model,
        )  # fmt: skip

    def _expect(self, loaded: Loaded) -> None:
        """Put the TrainerState of a step where Trainer looks for it: from it alone it tells where in the data it is."""
        self._expected = loaded.step if loaded.step is not None else -1
        state = TrainerState(**json.loads(loaded.checkpoint.per_rank("trainer", 0)["state"]))
        self._best = None
        best = state.best_model_checkpoint
        if self._source is None and best is not None and not os.path.isdir(best):
            # The run's folder has moved, or is in a store: Trainer would take the step for lost.
            self._best, state.best_model_checkpoint = self._roots[0] / os.path.basename(best), None
        state.save_to_json(str(Path(self._folder) / TRAINER_STATE_NAME))

    def _restore(self) -> None:
        """Everything at once, into what Trainer has prepared: so models may be sharded, and nothing is gathered."""
        manager, loaded = self._running, None
        if self._source is not None:
            loaded = self._load(self._source, self._state(), only="*")
        else:
            loaded = manager.restore(self._state(), **values_of(self._options, ResumeOptions))
        if loaded is None or loaded.step != self._expected:
            raise _OlderStep(loaded) if loaded is not None else RuntimeError(f"{manager.root} has lost its steps")
        self.restored = loaded
        self._rng = RNG().state_dict()  # what is drawn until training begins, to shuffle and to skip, does not count
        self._draws.resume(self._progress.taken.get("draws"), self._rng)

    def _began(self) -> None:
        """Trainer has read its state."""
        if self._best is not None:
            self._trainer.state.best_model_checkpoint = str(self._best)

    def _restore_rng(self) -> None:
        if self._rng is not None and not self._draws.restored:
            RNG().load_state_dict(self._rng)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "model": trainer.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "rng": RNG(),
            "trainer": PerRank(self._progress, elsewhere="first"),
            "step": trainer.state.global_step,
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        taken = sorted(state.keys() & self._also.keys())
        if taken:
            raise ValueError(f"also={{{taken[0]!r}: …}} has a name that the state of a Trainer has already")
        return {**state, **self._also}

    def _finished(self) -> None:
        """A step, or an epoch, is done: it was logged and evaluated."""
        trainer, manager = self._trainer, self.manager
        step = trainer.state.global_step
        if manager is None or step == 0 or self.should_stop:
            return
        if self._event == "step" and (trainer.control.should_training_stop or float(trainer.state.epoch).is_integer()):
            return  # its epoch's end comes next, and a resumed run does not evaluate that again
        state, is_best = trainer.state, trainer.state.best_global_step == step
        rhythm = self._asked
        if self.every is not None:
            rhythm = step % self.every == 0 or (is_best and trainer.args.load_best_model_at_end)
        due = trainer.control.should_training_stop or rhythm
        if due:
            self._asked = False
            state.stateful_callbacks = states_of_callbacks(trainer)
        before = state.best_model_checkpoint
        if is_best:
            state.best_model_checkpoint = str(self._roots[0] / self._options.name.format(step=step))
        saving = manager.step(step, self._state(), metric=self._metric_of(step), due=due)
        if saving is None:
            state.best_model_checkpoint = before
        elif is_best:
            self._best_saves.begun(saving)
        if saving is not None and not saving.skipped and not manager.should_stop:
            self._pushes.saved(saving)
        if manager.should_stop:
            self.should_stop = trainer.control.should_training_stop = True

    def _metric_of(self, step: int) -> float | None:
        state = self._trainer.state
        if self._only_best:
            return float(state.best_metric) if state.best_global_step == step else None
        return self._metric[1] if self._metric is not None and self._metric[0] == step else None

    def _load_best(self, otherwise: Callable[[], None]) -> None:
        """At the end of training, in the place of Trainer's own."""
        state = self._trainer.state
        self._running.wait()
        best = state.best_model_checkpoint = self._best_saves.newest()
        if self.should_stop or best is None:
            log.warning("the best step, %s, is not loaded: %s", best, "a signal" if self.should_stop else "not saved")
            return
        places = [location(best)]
        if places[0].parent in self._roots:
            places = [root / places[0].name for root in reversed(self._roots)]
        load_best(self._trainer.model, places, otherwise, self._options)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Trainer has just set these to zero."""
        if self.manager is None:
            raise RuntimeError("call HoldfastCallback(…).attach(trainer) before trainer.train()")
        self._best_saves = BestSaves(state.best_model_checkpoint)
        if self.restored is not None:
            self._progress.hand_back()
        else:
            self.manager.prepare(self._state())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remember which kind of end comes next."""
        self._event = "step"

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An epoch that a signal ended is not evaluated: time is short, and it is not over."""
        self._event = "epoch"
        if self.should_stop:
            control.should_evaluate = control.should_log = control.should_save = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        metrics: Mapping[str, float] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """What ``Keep(best=…)`` compares."""
        name = (args.metric_for_best_model or "loss").removeprefix("eval_")
        value = (metrics or {}).get(f"eval_{name}")
        self._metric = (state.global_step, float(value)) if value is not None else self._metric


class _OlderStep(Exception):
    """The newest step, whose TrainerState Trainer has read, proved damaged: an older one was restored."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(f"step {loaded.step} was restored in place of a newer one that cannot be read")
        self.loaded = loaded
