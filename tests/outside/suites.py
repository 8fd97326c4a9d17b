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
)
