"""The suites that `make outside` runs: what each needs, and which shim puts holdfast in torch's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One suite of another project.

    ``checkout`` is the folder's name below SRC, and ``tests`` lie in it. ``shim`` is a pytest plugin, a module of this
    folder, and so is ``both``, without which the tests do not run here with torch either. ``needs`` are modules without
    which nothing runs. ``passes`` is how many tests have to pass, of those that pass with torch. ``reasons`` says of a
    test that fails why it does. ``sources`` is the folder of the checkout from which the other project is imported.
    """

    name: str
    checkout: str
    commit: str
    tests: tuple[str, ...]
    shim: str
    needs: tuple[str, ...]
    passes: int
    reasons: dict[str, str]
    both: str | None = None
    sources: str = ""


_LIGHTNING = "tests/tests_pytorch"
_BACKGROUND = "the test looks into the folder inside of `fit`, when the save may not be committed yet"
_OMEGACONF = "a file for `torch.load(weights_only=True)` names no class of OmegaConf: the hyperparameters are a dict"
_FSSPEC = "holdfast has no store for `memory://`, which is fsspec's"

TORCH = (
    "test/distributed/checkpoint/e2e/test_e2e_save_and_load.py",
    "test/distributed/checkpoint/e2e/test_fine_tuning.py",
    "test/distributed/checkpoint/e2e/test_pipeline.py",
    "test/distributed/checkpoint/fsdp/test_fsdp_dsd.py",
    "test/distributed/checkpoint/test_checkpoint.py",
    "test/distributed/checkpoint/test_compatibility.py",
    "test/distributed/checkpoint/test_dtensor_checkpoint.py",
    "test/distributed/checkpoint/test_dtensor_resharding.py",
    "test/distributed/checkpoint/test_file_system_checkpoint.py",
    "test/distributed/checkpoint/test_file_system_checkpoint_cpu.py",
    "test/distributed/checkpoint/test_format_utils.py",
    "test/distributed/checkpoint/test_fsdp_model_state.py",
    "test/distributed/checkpoint/test_fsdp_optim_state.py",
    "test/distributed/checkpoint/test_fsdp_tp_checkpoint_conversion.py",
    "test/distributed/checkpoint/test_fsspec.py",
    "test/distributed/checkpoint/test_hsdp_checkpoint.py",
    "test/distributed/checkpoint/test_planner.py",
    "test/distributed/checkpoint/test_save_load_api.py",
    "test/distributed/checkpoint/test_tp_checkpoint.py",
)
"""torch's tests that save and load through torch.distributed.checkpoint."""

_EXTENSION = "gives the writer a private argument, an extension that transforms what it writes, which holdfast refuses"

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
            "test_checkpoint.TestCheckpointManager::test_save_and_purge_keeps_last_k_checkpoints": (
                "the test's double puts a file of its own into each step, and holdfast deletes no file of others"
            ),
            "test_checkpoint.TestFindLoadStepRemote::test_missing_folder_returns_negative_one": (
                "asks for a private method"
            ),
            "test_checkpoint.TestFindLoadStepRemote::test_returns_max_valid_step": "asks for a private method",
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
            "checkpointing.test_model_checkpoint::test_none_monitor_not_alternating": _BACKGROUND,
            "checkpointing.test_model_checkpoint::test_ckpt_version_after_rerun_same_trainer": (
                "a filename that repeats counts as taken once its save is committed, as with Lightning's own "
                "AsyncCheckpointIO: two saves in the same milliseconds get one name"
            ),
            "plugins.test_checkpoint_io_plugin::test_multi_wrapped_checkpoint_io_initialization": (
                "asks whether the default plugin is a TorchCheckpointIO"
            ),
            "connectors.test_checkpoint_connector::test_local_cross_device_checkpoint": _FSSPEC,
            "connectors.test_checkpoint_connector::test_ckpt_for_fsspec": _FSSPEC,
            "models.test_hparams::test_omega_conf_hparams[SaveHparamsModel]": _OMEGACONF,
            "models.test_hparams::test_omega_conf_hparams[SaveHparamsDecoratedModel]": _OMEGACONF,
            "models.test_hparams::test_omega_conf_hparams[SaveHparamsDataModule]": _OMEGACONF,
            "models.test_hparams::test_omega_conf_hparams[SaveHparamsDecoratedDataModule]": _OMEGACONF,
            "models.test_hparams::test_collect_init_arguments[DictConfSubClassBoringModel]": _OMEGACONF,
            "models.test_hparams::test_model_save_hyper_parameters_interpolation_with_hydra": _OMEGACONF,
            "models.test_hparams::test_collect_init_arguments[AggSubClassBoringModel]": (
                "a module among the hyperparameters is code, and left out with a warning"
            ),
        },
        sources="src",
    ),
    Suite(
        name="torch, tests of distributed.checkpoint, with the functions of holdfast.dcp",
        checkout="torch",
        commit="the commit of each file: tests/outside/__init__.py",
        tests=TORCH,
        shim="with_dcp_functions",
        needs=("expecttest",),
        passes=82,
        reasons={
            "test_e2e_save_and_load.TestE2ESaveAndLoad::test_partial_load": (
                "loads with a private function, and so with torch's reader; holdfast.open(path) does that"
            ),
            **{
                f"test_file_system_checkpoint_cpu.{test}_thread_count_{count}": _EXTENSION
                for test in (
                    "TestDistributedStateDictSaveLoadRot13::test_read_write_tensor_and_blob",
                    "TestDistributedStateDictSaveLoadZStandard::test_read_write_only_tensor",
                )
                for count in (1, 2)
            },
        },
        both="on_cpu",
    ),
    Suite(
        name="torch, tests of distributed.checkpoint, with Writer and Reader in torch's engine",
        checkout="torch",
        commit="the commit of each file: tests/outside/__init__.py",
        tests=TORCH,
        shim="with_dcp_storage",
        needs=("expecttest",),
        passes=86,
        reasons={
            "test_format_utils.TestFormatUtils::test_torch_save_to_dcp": (
                "saves to a folder that holds another file, which holdfast refuses"
            ),
        },
        both="on_cpu",
    ),
    Suite(
        name="transformers, Trainer's checkpoints, with holdfast.trainers.huggingface",
        checkout="transformers",
        commit="22c22fa26f5f3352d243bc358f0947af05b1d61b",
        tests=tuple(
            f"tests/trainer/test_trainer_checkpointing.py::Trainer{name}Test"
            for name in ("ResumeTraining", "AutoBatchSize", "InterruptedTraining", "BestModel")
        ),
        shim="with_transformers",
        needs=("transformers", "accelerate"),
        passes=15,
        reasons={
            "test_trainer_checkpointing.TrainerBestModelTest::test_save_best_checkpoint": (
                "holdfast saves the last step of a training, too"
            ),
            "test_trainer_checkpointing.TrainerBestModelTest::test_best_model_checkpoint_behavior": (
                "with save_total_limit=1 Trainer deletes the last step when training ends, and holdfast keeps it, so "
                "that a finished run makes no further step"
            ),
        },
    ),
    Suite(
        name="accelerate, save_state and load_state, with holdfast.trainers.accelerate",
        checkout="accelerate",
        commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        tests=("tests/test_state_checkpointing.py",),
        shim="with_accelerate",
        needs=("accelerate", "parameterized"),
        passes=16,
        reasons={},
    ),
)
