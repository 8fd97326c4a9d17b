"""The suites that `make outside` runs: what each needs, and which shim puts holdfast in torch's place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One suite of another project.

    ``checkout`` is the folder's name below SRC, ``tests`` lie in it. ``shim`` is a pytest plugin, a module here.
    ``needs`` are modules without which nothing runs. ``passes`` is how many tests have to pass, of those that pass with
    torch. ``reasons`` says of a test that fails why it does.
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
        shim="tests.outside.titan",
        needs=("tyro", "grain", "spmd_types"),
        passes=40,
        reasons={},
    ),
)
