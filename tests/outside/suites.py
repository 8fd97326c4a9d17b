"""The suites that `make outside` runs: what each needs, and which shim puts holdfast in torch's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One suite of another project.

    ``checkout`` is the folder's name below SRC, and ``tests`` lie in it. ``shim`` is a pytest plugin, a module of this
    folder. ``needs`` are modules without which nothing runs. ``passes`` is how many tests have to pass, of those that
    pass with torch. ``reasons`` says of a test that fails why it does. ``sources`` is the folder of the checkout from
    which the other project is imported.
    """

    name: str
    checkout: str
    commit: str
    tests: tuple[str, ...]
    shim: str
    needs: tuple[str, ...]
    passes: int
    reasons: dict[str, str]
    sources: str = ""


_LIGHTNING = "tests/tests_pytorch"
_BACKGROUND = "the test looks into the folder inside of `fit`, when the save may not be committed yet"
_OMEGACONF = "a file for `torch.load(weights_only=True)` names no class of OmegaConf: the hyperparameters are a dict"
_FSSPEC = "holdfast has no store for `memory://`, which is fsspec's"

SUITES = (
    Suite(
        name="torchtitan, checkpoint tests, with holdfast.trainers.titan",
        checkout="torchtitan",
        commit="b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
        tests=("tests/unit_tests/test_checkpoint.py",),
        shim="with_titan",
        needs=("tyro", "grain", "spmd_types"),
        passes=40,
        reasons={
            "TestCheckpointManager::test_save_and_purge_keeps_last_k_checkpoints": (
                "the test's double puts a file of its own into each step, and holdfast deletes no file of others"
            ),
            "TestFindLoadStepRemote::test_missing_folder_returns_negative_one": "asks for a private method",
            "TestFindLoadStepRemote::test_returns_max_valid_step": "asks for a private method",
        },
    ),
    Suite(
        name="Lightning, checkpointing tests, with HoldfastCheckpointIO",
        checkout="pytorch-lightning",
        commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
        # What saves or loads checkpoints on a CPU: ModelCheckpoint, load_from_checkpoint, fit(ckpt_path=), plugins,
        # hyperparameters. Left out: test_legacy_checkpoints.py, whose files Lightning keeps on a server of its own.
        tests=(
            f"{_LIGHTNING}/checkpointing/test_checkpoint_callback_frequency.py",
            f"{_LIGHTNING}/checkpointing/test_model_checkpoint.py",
            f"{_LIGHTNING}/checkpointing/test_torch_saving.py",
            f"{_LIGHTNING}/checkpointing/test_trainer_checkpoint.py",
            f"{_LIGHTNING}/callbacks/test_model_checkpoint_additional_cases.py",
            f"{_LIGHTNING}/callbacks/test_model_checkpoint_edge_cases.py",
            f"{_LIGHTNING}/callbacks/test_model_checkpoint_manual_opt.py",
            f"{_LIGHTNING}/callbacks/test_model_checkpoint_step_interval_val_metric.py",
            f"{_LIGHTNING}/core/test_saving.py",
            f"{_LIGHTNING}/models/test_hparams.py",
            f"{_LIGHTNING}/models/test_restore.py",
            f"{_LIGHTNING}/plugins/test_async_checkpoint.py",
            f"{_LIGHTNING}/plugins/test_checkpoint_io_plugin.py",
            f"{_LIGHTNING}/trainer/connectors/test_checkpoint_connector.py",
        ),
        shim="with_lightning",
        needs=("lightning_utilities", "torchmetrics", "cloudpickle", "hydra", "omegaconf", "sklearn", "tensorboard"),
        passes=275,
        reasons={
            "test_model_checkpoint::test_none_monitor_not_alternating": _BACKGROUND,
            "test_model_checkpoint::test_ckpt_version_after_rerun_same_trainer": (
                "a filename that repeats counts as taken once its save is committed, as with Lightning's own "
                "AsyncCheckpointIO: two saves in the same milliseconds get one name"
            ),
            "test_checkpoint_io_plugin::test_multi_wrapped_checkpoint_io_initialization": (
                "asks whether the default plugin is a TorchCheckpointIO"
            ),
            "test_checkpoint_connector::test_local_cross_device_checkpoint": _FSSPEC,
            "test_checkpoint_connector::test_ckpt_for_fsspec": _FSSPEC,
            "test_hparams::test_omega_conf_hparams[SaveHparamsModel]": _OMEGACONF,
            "test_hparams::test_omega_conf_hparams[SaveHparamsDecoratedModel]": _OMEGACONF,
            "test_hparams::test_omega_conf_hparams[SaveHparamsDataModule]": _OMEGACONF,
            "test_hparams::test_omega_conf_hparams[SaveHparamsDecoratedDataModule]": _OMEGACONF,
            "test_hparams::test_collect_init_arguments[DictConfSubClassBoringModel]": _OMEGACONF,
            "test_hparams::test_model_save_hyper_parameters_interpolation_with_hydra": _OMEGACONF,
            "test_hparams::test_collect_init_arguments[AggSubClassBoringModel]": (
                "a module among the hyperparameters is code, and left out with a warning"
            ),
        },
        sources="src",
    ),
)
