"""What ``import holdfast`` gives and does: few names, nothing imported, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parents[1]

LOOK = """
import json, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
import holdfast
from holdfast import events
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "listeners": len(events._listeners) + len(events._observers),
    "signals": [number for number, handler in before.items() if signal.getsignal(number) is not handler],
}))
"""


def test_sixteen_names() -> None:
    assert len(holdfast.__all__) == 16 and len(set(holdfast.__all__)) == 16
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_the_import_imports_nothing_else_and_starts_nothing() -> None:
    answer = json.loads(subprocess.check_output([sys.executable, "-c", LOOK], cwd=ROOT, text=True))
    ours = [name for name in answer["modules"] if name.split(".")[0] == "holdfast"]
    assert ours == ["holdfast", "holdfast.events", "holdfast.ondisk", "holdfast.ondisk.version"]
    assert not {"torch", "numpy", "rich", "typer", "msgspec", "yaml"} & set(answer["modules"])
    assert answer["threads"] == 1 and answer["listeners"] == 0 and answer["signals"] == []


@pytest.mark.slow
def test_saving_imports_no_reader_of_another_format_and_no_numpy_of_its_own() -> None:
    code = (
        "import sys, torch, holdfast\nhad = set(sys.modules)\nholdfast.save, holdfast.CheckpointManager\n"
        "print('\\n'.join(name for name in set(sys.modules) - had))"
    )
    imported = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    readers = ("dcp", "deepspeed", "olmo", "megatron", "composer", "hfai", "huggingface", "torch_save", "torchsnapshot")
    assert "holdfast.manager" in imported
    assert not [name for name in imported if name.startswith(tuple(f"holdfast.formats.{one}" for one in readers))]
    assert not [name for name in imported if name.split(".")[0] in ("numpy", "obstore", "rich", "yaml")]


@pytest.mark.slow
def test_the_functions_hide_the_modules_of_their_names() -> None:
    code = (
        "import holdfast.load, holdfast.save, holdfast.copy, holdfast.convert, holdfast.repair.verify\n"
        "assert all(callable(f) for f in (holdfast.load, holdfast.save, holdfast.copy, holdfast.convert))\n"
        "from holdfast.load import Loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", sorted(holdfast._MOVED))
def test_a_name_that_has_moved_works_and_says_where_it_is(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"holdfast\.{name} has moved: use holdfast\.") as warnings:
        moved = getattr(holdfast, name)
    assert warnings[0].filename == __file__
    module, _, attribute = str(warnings[0].message).rpartition("use ")[2].rpartition(".")
    assert getattr(import_module(module), attribute) is moved


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        holdfast.lod  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_the_first_event_installs_bars_and_the_timeline_of_the_environment(tmp_path: Path) -> None:
    code = (
        "import torch, holdfast\nfrom holdfast import events\n"
        "assert not events._listeners\n"
        f"holdfast.save({{'w': torch.ones(2)}}, {str(tmp_path / 'c')!r})\n"
        "print([type(one).__name__ for one in events._listeners], len(events._observers))"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    for recorders, environment in enumerate([plain, {**plain, "HOLDFAST_TIMELINE": str(tmp_path / "timeline")}]):
        command = [sys.executable, "-c", code.replace("/c'", f"/c{recorders}'")]
        shown = subprocess.check_output(command, cwd=ROOT, text=True, env=environment)
        assert shown.strip() == f"['Bars'] {recorders}"


def test_the_other_project_of_this_name_is_noticed(tmp_path: Path) -> None:
    """Whoever has installed ``holdfast`` from PyPI has another project's files in the same folder."""
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in (ROOT / "holdfast").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
    zipfile.ZipFile(tmp_path / "package.zip").extractall(site)
    (site / "holdfast_torch-0.1.0.dist-info").mkdir()
    command = [sys.executable, "-W", "error", "-c", "import holdfast"]
    assert subprocess.run(command, cwd=site, capture_output=True).returncode == 0
    (site / "holdfast-0.3.1.dist-info").mkdir()
    done = subprocess.run(command, cwd=site, capture_output=True, text=True)
    assert "holdfast-0.3.1 is installed beside holdfast-torch" in done.stderr and done.returncode == 1
