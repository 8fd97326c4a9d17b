"""The suites that `make outside` runs: what each needs, and which shim puts holdfast in torch's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One suite of another project.

    ``checkout`` is the folder's name below SRC, and ``tests`` lie in it. ``shim`` is a pytest plugin, a module of this
    folder. ``needs`` are modules without which nothing runs. ``passes`` is how many tests have to pass, of those that
    pass with torch. ``reasons`` says of a test that fails why it does.
    """

    name: str
    checkout: str
    commit: str
    tests: tuple[str, ...]
    shim: str
    needs: tuple[str, ...]
    passes: int
    reasons: dict[str, str]


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
            "TrainerBestModelTest::test_save_best_checkpoint": "holdfast saves the last step of a training, too",
            "TrainerBestModelTest::test_best_model_checkpoint_behavior": (
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
