"""Lightning's checkpoints as single files of `HoldfastCheckpointIO`; run on a rank by `test_lightning_files.py`."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import TorchCheckpointIO

import holdfast
from holdfast.errors import SaveFailed
from holdfast.storage.local import disk
from holdfast.trainers.lightning import HoldfastCheckpointIO
from tests.trainers.lightning_plugin import Does, failure, held_back, make_trainer, seen, state, step_of, threads


class Sized(BoringModel):
    """A module with hyperparameters of several kinds, and a metric."""

    def __init__(self, width: int, data: Path, sizes: dict[int, str], act: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.more = torch.nn.Linear(width, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", torch.tensor(float(self.global_step)))


class Numbered(BoringDataModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.hparams["seed"]}


def weights_of(module: pl.LightningModule) -> dict[str, Any]:
    return {key: value.tolist() for key, value in module.state_dict().items()}


def found_as_a_file(root: Path) -> dict[str, Any]:
    """What Lightning's users do with `best_model_path`."""
    saves = ModelCheckpoint(root, monitor="val", mode="max", save_top_k=1)
    trainer = make_trainer(root, saves, max_steps=-1, max_epochs=3, limit_train_batches=2)
    module = Sized(3, Path("/data"), {1: "one"}, act=print)
    trainer.fit(module, datamodule=Numbered(5))
    path = saves.best_model_path
    last = weights_of(module)
    again = Sized.load_from_checkpoint(path)
    found: dict[str, Any] = {
        "is a file": os.path.isfile(path),
        "load_from_checkpoint": weights_of(again) == last,
        "hyperparameters": dict(again.hparams),
        "overridden": Sized.load_from_checkpoint(path, data="/other").hparams["data"],
        "data module": Numbered.load_from_checkpoint(path).hparams["seed"],
        "torch.load": int(torch.load(path, weights_only=True)["global_step"]),
        "opened": step_of(Path(path)),
        "names": sorted(name for name in holdfast.open(path).tensors if name.startswith("model/")),
        "threads": threads(),
        "left": sorted(os.listdir(root)),
    }
    for name in ("validate", "test", "predict"):
        other = Sized(3, Path("/data"), {})
        getattr(trainer, name)(other, datamodule=Numbered(5), ckpt_path="best" if name == "test" else path)
        found[name] = weights_of(other) == last
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Sized(3, Path("/data"), {}), datamodule=Numbered(5), ckpt_path=path)
    found["went on"] = trainer.global_step
    return found


def where_a_folder_was(root: Path) -> dict[str, Any]:
    """Folders that earlier versions saved under names of files; a folder that is no checkpoint."""
    plugin, found = HoldfastCheckpointIO(), {}
    for name in ("loaded", "removed", "replaced"):
        holdfast.save(state(1), root / f"{name}.ckpt", step=1)
    (root / "mine.ckpt").mkdir()
    (root / "mine.ckpt" / "notes").write_text("")
    found["loaded"] = plugin.load_checkpoint(root / "loaded.ckpt")["global_step"]
    plugin.remove_checkpoint(root / "removed.ckpt")
    plugin.save_checkpoint(state(2), root / "replaced.ckpt")
    found["is a file"] = (root / "replaced.ckpt").is_file()
    found["mine"] = failure(lambda: plugin.save_checkpoint(state(2), root / "mine.ckpt"))
    found["kept"] = os.listdir(root / "mine.ckpt")
    return {**found, **seen(root)}


def without_exchange(root: Path) -> dict[str, Any]:
    """The same replacement on a file system that cannot exchange two names; at last the new name cannot be given."""
    plugin = HoldfastCheckpointIO()
    holdfast.save(state(1), root / "saved.ckpt", step=1)
    refused = False

    def hook(call: disk.Call, do: Any) -> Any:
        if call.verb == "exchange":
            return False
        if refused and call.verb == "replace" and call.path.endswith(".holdfast"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return do()

    with disk.hooked(hook):
        refused = True
        failed = failure(lambda: plugin.save_checkpoint(state(2), root / "saved.ckpt"))
        after = seen(root)
        refused = False
        plugin.save_checkpoint(state(3), root / "saved.ckpt")
    return {"failed": failed, "after": after, "file": (root / "saved.ckpt").is_file(), **seen(root)}


def faults(root: Path) -> Any:
    """Each call on the disk of a save fails once: the file is as the error says, and nothing is beside it."""
    plugin, path = HoldfastCheckpointIO(), root / "saved.ckpt"
    failing, calls, outcomes = 0, 0, []

    def hook(call: disk.Call, do: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return do()

    while calls >= failing:
        plugin.save_checkpoint(state(1), path)
        failing, calls, outcome = failing + 1, 0, "saved"
        with disk.hooked(hook):
            try:
                plugin.save_checkpoint(state(2), path)
            except SaveFailed as error:
                outcome = "failed" if error.settled else "perhaps"
        outcomes.append(outcome)
        if seen(root) != {"saved.ckpt": 1 if outcome == "failed" else 2}:
            return failing, outcome, seen(root)
    return sorted(set(outcomes)), outcomes.count("failed") >= 5


def flipped_bytes(root: Path) -> list[Any]:
    """Offsets of a file at which a byte that was altered changes what is loaded, without an error."""
    plugin, path = HoldfastCheckpointIO(), root / "saved.ckpt"
    plugin.save_checkpoint(state(7), path)
    data, wrong = path.read_bytes(), []
    for at in range(0, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            loaded = plugin.load_checkpoint(path)
        except Exception:  # noqa: BLE001 - if it does not look like ours any more, torch says what is wrong
            continue
        if loaded["global_step"] != 7 or not torch.equal(
            loaded["state_dict"]["weight"], state(7)["state_dict"]["weight"]
        ):
            wrong.append(at)
    path.write_bytes(data[: len(data) // 2])
    return [*wrong, *([] if failure(lambda: plugin.load_checkpoint(path)) == "Damaged" else ["cut short"])]


def read_with_map_location(root: Path) -> dict[str, Any]:
    plugin, path = HoldfastCheckpointIO(), root / "saved.ckpt"
    plugin.save_checkpoint(state(1), path)
    places = {"nothing": None, "device": torch.device("cpu"), "text": "meta", "function": lambda storage, _: storage}
    found: dict[str, Any] = {
        name: plugin.load_checkpoint(path, map_location=place)["state_dict"]["weight"].device.type
        for name, place in places.items()
    }
    TorchCheckpointIO().save_checkpoint({**state(3), "code": Sized}, root / "theirs.ckpt")
    found["theirs"] = plugin.load_checkpoint(root / "theirs.ckpt", weights_only=False)["code"] is Sized
    found["missing"] = failure(lambda: plugin.load_checkpoint(root / "missing.ckpt"))
    return found


def a_name_that_repeats(root: Path) -> dict[str, Any]:
    """A filename without the step, twice before the first save is committed: the second replaces it, and says so."""
    told: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            go.set()

    handler = Listens()
    logging.getLogger("holdfast").addHandler(handler)

    with held_back() as go:
        saves = Does(on_train_batch_end=lambda trainer: trainer.save_checkpoint(root / "same.ckpt"))
        make_trainer(root, saves).fit(BoringModel())
    logging.getLogger("holdfast").removeHandler(handler)
    return {"told": any("put {step} into the filename" in text for text in told), **seen(root)}
