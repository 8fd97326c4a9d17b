"""The suites that `make outside` runs: what each needs, and which shim puts holdfast in torch's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One suite of another project.

    ``checkout`` is the folder's name below SRC, and ``tests`` lie in it. ``shim`` is a pytest plugin, a module of this
    folder, and so is ``both``, without which the tests do not run here with torch either. ``needs`` are modules without
    which nothing runs. ``passes`` is how many tests have to pass, of those that pass with torch. ``reasons`` says of a
    test that fails why it does.
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
)
