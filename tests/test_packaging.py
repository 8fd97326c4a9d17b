"""The wheel, installed where nothing of this checkout is: the quick start and the command run from it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).parent.parent

QUICK_START = """
import torch, holdfast
state = {"model": torch.nn.Linear(4, 4), "rng": holdfast.RNG(), "step": 7}
holdfast.save(state, "step-7")
assert holdfast.load("step-7", into=state).step == 7
print(holdfast.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy: building leaves files in the folder that it builds."""
    root = tmp_path_factory.mktemp("wheel")
    copied = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "holdfast"]
    subprocess.run(["cp", "-r", *(str(CHECKOUT / name) for name in copied), str(root)], check=True)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(root / "dist"), str(root)])
    (made,) = (root / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment that holds the wheel; what it depends on comes from the one of the tests."""
    root = tmp_path_factory.mktemp("clean")
    venv.create(root, with_pip=False)
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(root / "bin/python"),
            "install",
            "--quiet",
            "--no-deps",
            str(wheel),
        ]
    )
    site = next((root / "lib").glob("python*/site-packages"))
    # Not the folder's own .pth files: they would lead to this checkout.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield root


def _run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    package = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "holdfast").rglob("*.py")}
    assets = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "holdfast/view/assets").glob("*")}
    assert {name for name in names if name.startswith("holdfast/")} == package | assets | {"holdfast/py.typed"}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"holdfast", "holdfast_torch"}
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_the_quick_start_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    told = _run([str(installed / "bin/python"), "-c", QUICK_START], tmp_path)
    assert told.strip().startswith(str(installed))


@pytest.mark.slow
def test_the_command_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    _run([str(installed / "bin/python"), "-c", QUICK_START], tmp_path)
    assert "step-7 is whole" in _run([str(installed / "bin/holdfast"), "verify", "step-7"], tmp_path)
