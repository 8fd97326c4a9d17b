"""Make the pictures of docs/pictures/ anew: a real run on four ranks, its pages, and a browser that looks at them.

    python docs/pictures.py

Needs Chromium (`HOLDFAST_CHROMIUM`, or one of the usual names in PATH) and takes a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from holdfast.storage.local.local_place import LocalPlace  # noqa: E402
from tests.view.browser import FLAGS, Tab, chromium  # noqa: E402
from tests.view.telling import told  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LARGEST = 200_000


def main() -> None:
    """Train, make the pages, take the pictures."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as work, sync_playwright() as driver:
        folder = LocalPlace(work)
        train(folder)
        browser = driver.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        checkpoint = folder / "step-000000006.html"
        holdfast(
            folder, "view", "run/step-000000006", "--stats", "model/*", "--timeline", "timeline", "-o", checkpoint.name
        )
        # Nobody needs to see where this folder was.
        checkpoint.write_text(checkpoint.read_text().replace(str(folder.resolve()), "/ckpt"))
        picture(browser, checkpoint, "checkpoint-light", "light", at_a_tensor)
        picture(browser, checkpoint, "timeline", "dark", None, ".card:has(.lanes)")
        made_up(folder / "gpt-7b")
        holdfast(folder, "view", "gpt-7b", "-o", "run.html")
        holdfast(folder, "view", "run/step-000000003", "--against", "run/step-000000006", "-o", "diff.html")
        for name in ("run", "diff"):
            page = folder / f"{name}.html"
            page.write_text(page.read_text().replace(str(folder.resolve()), "/ckpt"))
            picture(browser, page, f"{name}-light", "light", {"run": at_a_save, "diff": at_a_layer}[name])
        terminal(folder / "gpt-7b")
        browser.close()


def made_up(root: Path) -> None:
    """What the journal of a run of ten hours might tell: only the page is real."""
    import time

    import torch

    import holdfast as library

    root.mkdir()
    text = "cannot write step-000012000/model: No space left on device (the disk is full)"
    entries = told(root, start=time.time() - 120 * 300 - 7200, text=text)
    for entry in entries[-4:]:
        library.save({"w": torch.zeros(64, 64), "step": entry.step}, root / f"step-{entry.step:09d}", step=entry.step)


def terminal(root: Path) -> None:
    """What `holdfast watch` shows, as a drawing."""
    from rich.console import Console

    from holdfast.cli.watch import picture as shown
    from holdfast.inspect.history import Past
    from holdfast.inspect.standing import standing

    history = Past(root).look()
    with Path(os.devnull).open("w") as nothing:
        console = Console(record=True, width=104, file=nothing, force_terminal=True, highlight=False)
        console.print(shown(standing("s3://bucket/gpt-7b", history), history))
    drawn = console.export_svg(title="holdfast watch s3://bucket/gpt-7b")
    # No page of ours asks another site for a font.
    (PICTURES / "watch.svg").write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def at_a_save(page: Any) -> None:
    """Charts over time, and the pointer at a save that took long."""
    page.click("[data-value=time]")
    page.hover("#seconds", position={"x": 212, "y": 60})
    page.wait_for_timeout(300)


def at_a_layer(page: Any) -> None:
    """One tensor, and the pointer at another one."""
    page.click("#names .row >> nth=1")
    page.hover("#map", position={"x": 420, "y": 120})
    page.wait_for_timeout(300)


def train(folder: Path) -> None:
    """A few steps of the example in FSDP2 on four ranks, saved in the background and written down as a timeline."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(ROOT / "examples" / "train.py"), "--root", "run", "--layers", "6", "--steps", "6", "--every", "3",
    ]  # fmt: skip
    here = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HOLDFAST_TIMELINE": str(folder / "timeline"),
    }
    subprocess.run(command, cwd=folder, env=here, check=True, capture_output=True)


def holdfast(folder: Path, *arguments: str) -> None:
    """The command line."""
    command = [sys.executable, "-m", "holdfast", *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def at_a_tensor(page: Any) -> None:
    """One with a histogram, chosen by way of the filter, which is cleared again."""
    page.keyboard.press("/")
    page.keyboard.type("model/*qkv.weight")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)


def picture(
    browser: Any, path: Path, name: str, scheme: str, prepare: Callable[[Any], None] | None, only: str = ""
) -> None:  # fmt: skip
    """A screenshot of a page, or of one part of it."""
    tab = Tab(browser, scheme=scheme, width=1200, height=900)
    page = tab.open(path)
    if prepare:
        prepare(page)
    target = PICTURES / f"{name}.png"
    page.locator(only).screenshot(path=target) if only else page.screenshot(path=target)
    tab.close()
    size = target.stat().st_size
    sys.stdout.write(f"{target.relative_to(ROOT)}: {size:,} bytes\n")
    if size > LARGEST:
        raise SystemExit(f"{target} is larger than {LARGEST:,} bytes")


if __name__ == "__main__":
    main()
