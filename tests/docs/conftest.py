"""The warm process that pages run in, one for each process of pytest that asks for it, and the site, made once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

ASK = Path(__file__).with_name("ask.py")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a page's process."""
    folder = tmp_path_factory.mktemp("warm")
    for word in ("holdfast", "python", "python3", "torchrun"):
        command = folder / "bin" / word
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{ASK}" {word.rstrip("3")} "$@"\n')
        command.chmod(0o755)
    environment = {
        "HOLDFAST_DOCS_WARM": str(folder / "socket"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **{name: os.environ[name] for name in ("TMPDIR", "LD_LIBRARY_PATH") if name in os.environ},
    }
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.warm", environment["HOLDFAST_DOCS_WARM"]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert running.stdout is not None and running.stdin is not None
    assert running.stdout.readline() == b"ready\n"
    yield environment
    running.stdin.close()
    running.wait()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; building it may give no warning. Processes of pytest that run side by side share one."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, built = shared / "site", shared / "site-built"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not built.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
            built.touch()
    return folder
