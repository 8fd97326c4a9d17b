"""The table of runs: what each is called, its command, and which code it exercises.

The recorder, the digest and the page read it. Never runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Output = Literal["pytest", "soak", "fuzz", "crash", "any-state", "zoo", "outside", "benchmark"]
PYTHON = ".venv/bin/python"


@dataclass(frozen=True)
class Run:
    """``modules`` of this repository count with all that they import, ``files`` are patterns below its root.

    ``figures`` is the JSON that a benchmark writes, ``python`` the interpreter that the command uses. A word of the
    command like ``$SRC`` is taken from the environment and is recorded as it stands here.
    """

    name: str
    command: tuple[str, ...]
    output: Output
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    figures: str | None = None
    python: str = PYTHON
    environment: Mapping[str, str] = field(default_factory=dict)


PROGRAMS = ("tests/**/*", "zoo/*.py", "examples/**/*.py", "benchmarks/**/*.py", "evidence/*.py")
SAVE = ("holdfast.save", "holdfast.saver", "holdfast.write", "holdfast.storage")
LOAD = ("holdfast.load", "holdfast.checkpoint")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def _tests(name: str, target: str, *arguments: str, python: str = PYTHON) -> Run:
    return Run(name, ("make", target, *arguments), "pytest", ("holdfast",), PROGRAMS, python=python)


def _other_torch(version: str) -> Run:
    torch = f"torch=={version}.0"
    return _tests(f"test-torch-{version}", "test-torch", f"TORCH={torch}", python=f".venv/{torch}/bin/python")


TESTS = (
    _tests("test", "test"),
    _tests("test-all", "test-all"),
    _other_torch("2.10"),
    _other_torch("2.15"),
    Run(
        "fault-matrix",
        (PYTHON, "-m", "pytest", "tests/faults", "-m", "not timed", "-n", "3", "--dist", "worksteal"),
        "pytest",
        ("holdfast",),
        ("tests/faults/*.py", "tests/*.py"),
        environment=ONE_THREAD,
    ),
)

RANDOM = (
    Run("soak", ("make", "soak", "SOAK_MINUTES=60"), "soak", ("holdfast", "tests.soak")),
    Run(
        "crash-states",
        (PYTHON, "-m", "tests.crash"),
        "crash",
        ("holdfast", "tests.crash"),
        environment=ONE_THREAD,
    ),
    Run(
        "any-state",
        (PYTHON, "-m", "tests.any_state", "--minutes", "60"),
        "any-state",
        ("tests.any_state", *SAVE, *LOAD),
        environment=ONE_THREAD,
    ),
    Run("zoo", ("make", "zoo"), "zoo", (*SAVE, *LOAD, "zoo"), ("zoo/requirements.txt",), python=".venv/zoo/bin/python"),
    Run(
        "outside",
        ("make", "outside", "SRC=$SRC"),
        "outside",
        ("holdfast",),
        ("tests/outside/*",),
        python=".venv/outside/bin/python",
    ),
)

FUZZ_SECONDS = 600
LONGER = {"manifest": 1200, "datafile": 1200, "full": 1200, "dcp": 1200}
FUZZED = {
    "manifest": "holdfast.ondisk",
    "values": "holdfast.ondisk",
    "datafile": "holdfast.read",
    "part": "holdfast.commit",
    "url": "holdfast.storage",
    "dcp": "holdfast.formats.dcp",
    "megatron": "holdfast.formats.megatron",
    "olmo": "holdfast.formats.olmo",
    "deepspeed": "holdfast.formats.deepspeed",
    "torchsnapshot": "holdfast.formats.torchsnapshot",
    "torch_checkpointing": "holdfast.formats.torch_checkpointing",
    "composer": "holdfast.formats.composer",
    "hfai": "holdfast.formats.hfai",
    "huggingface": "holdfast.formats.huggingface",
    "full": "holdfast.formats.torch_save",
}
"""What each target of `make fuzz` opens; readers are imported by name, so that no import leads to them."""

FUZZ = tuple(
    Run(
        f"fuzz-{target}",
        ("make", "fuzz", f"FUZZ_TARGETS={target}", f"FUZZ_SECONDS={LONGER.get(target, FUZZ_SECONDS)}"),
        "fuzz",
        ("tests.fuzz", "holdfast.load", "holdfast.tools", module),
    )
    for target, module in FUZZED.items()
)

BENCHMARKED = {
    "bench": (*SAVE, *LOAD, "holdfast.formats.dcp"),
    "stall": (*SAVE, "holdfast.tools"),
    "unshard": ("holdfast.convert", "holdfast.formats.dcp"),
    "live_export": ("holdfast.convert", *SAVE),
    "merging": ("holdfast.tools", "holdfast.export", "holdfast.formats.huggingface", "holdfast.formats.torch_save"),
    "remap": (*SAVE, *LOAD, "holdfast.remap"),
    "share": (*SAVE, *LOAD),
    "incremental": (*SAVE, *LOAD),
    "replicas": SAVE,
    "many": (*SAVE, *LOAD, "holdfast.formats.huggingface"),
    "values": (*SAVE, *LOAD),
    "verify": (*SAVE, "holdfast.tools"),
    "scale": (),
    "compression": (),
    "cloud": (*SAVE, *LOAD),
}
"""The benchmarks of `make bench`, with what each asks of the package."""


def _benchmark(module: str, asks: tuple[str, ...]) -> Run:
    name = module.replace("_", "-")
    python = ".venv/peers/bin/python" if module == "cloud" else PYTHON
    return Run(
        name,
        (python, "-m", f"benchmarks.{module}"),
        "benchmark",
        (f"benchmarks.{module}", *asks),
        figures=f"bench-out/{name}.json",
        python=python,
    )


BENCHMARKS = tuple(_benchmark(module, asks) for module, asks in BENCHMARKED.items())

RUNS: dict[str, Run] = {run.name: run for run in (*TESTS, *RANDOM, *FUZZ, *BENCHMARKS)}
