"""What torchtitan asks of a checkpoint manager, for trainers that do not have a current torchtitan."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from holdfast.events import log


def _fault(config: BaseCheckpointManager.Config) -> str | None:
    """What is wrong with the fields, in torchtitan's words; None if they fit together."""
    path, from_hf = config.initial_load_path, config.initial_load_in_hf
    excluded = config.exclude_from_loading
    if not config.folder.strip():
        return "The 'folder' field cannot be empty."
    if config.interval < 1:
        return "Checkpoint interval needs to be at least 1 step."
    if config.keep_latest_k < 0:
        return "keep_latest_k cannot be negative."
    if config.keep_latest_k == 1:
        return (
            "We need to maintain at least 2 checkpoint replicas, as the last one may be in the process of being saved."
        )
    if "model" in excluded:
        return "model key shouldn't be in exclude_from_loading."
    if "optimizer" in excluded and "lr_scheduler" not in excluded:
        return "lr_scheduler must be excluded when optimizer is excluded."
    if path and not (path.startswith("/") or "://" in path):
        return f"initial_load_path must be an absolute path or a remote URI (e.g. gs://...): {path}"
    if from_hf and not config.initial_load_model_only:
        return "initial_load_in_hf requires initial_load_model_only."
    if config.initial_load_in_hf_quantized and not (from_hf and path):
        return "initial_load_in_hf_quantized requires initial_load_in_hf and initial_load_path."
    if config.last_save_in_hf and not config.last_save_model_only:
        return "last_save_in_hf requires last_save_model_only=True."
    if config.last_save_in_hf and "://" in config.folder:
        return f"last_save_in_hf is not supported with a remote checkpoint.folder: {config.folder}"
    if from_hf and path and "://" in path:
        return f"initial_load_in_hf is not supported with a remote initial_load_path: {path}"
    return None


class BaseCheckpointManager:
    """The calls that a trainer makes. Each does nothing if ``enable`` is False, else it calls what a subclass has."""

    enable: bool
    save_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The fields of torchtitan's checkpoint configuration, with its defaults and its checks."""

        _owner: ClassVar[type | None] = None

        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False

        def __post_init__(self) -> None:
            if self.initial_load_path:
                self.initial_load_path = self.initial_load_path.strip()
            fault = _fault(self)
            if fault is not None:
                raise ValueError(fault)
            if self.load_only and self.enable_first_step_checkpoint:
                log.warning("checkpoint.load_only is True; enable_first_step_checkpoint will be ignored.")
            if self.initial_load_model_only and not self.initial_load_path:
                log.debug("initial_load_model_only=True has no effect without an initial_load_path.")

        def build(self, **arguments: Any) -> Any:
            """Make the manager that this configuration belongs to. ``arguments`` are those of its constructor."""
            if self._owner is None:
                raise NotImplementedError(f"{type(self).__qualname__} belongs to no manager")
            return self._owner(config=replace(self), **arguments)

        def to_dict(self) -> dict[str, Any]:
            """The fields as a plain dict."""
            return asdict(self)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls

    def load(self, step: int = -1) -> bool:
        """Load ``step``, or the newest one. False if there is none."""
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is time. True if a save was made or begun."""
        return self.enable and self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the last save has copied everything. The steps of optimizers wait for it anyway."""
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """Wait until the last save is committed. Raises SaveFailed if it failed."""
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self) -> None:
        """Wait for the save under way. Raises SaveFailed if it failed."""
        if self.enable:
            self._close()

    def _load(self, step: int = -1) -> bool:
        raise NotImplementedError

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        raise NotImplementedError

    def _maybe_wait_for_staging(self) -> None:
        raise NotImplementedError

    def _wait_for_saving(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
