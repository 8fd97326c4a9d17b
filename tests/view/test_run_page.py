"""The page of a run: what of a run stands in it, its charts and its table, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.cli.app import run
from holdfast.cli.errors import Code
from holdfast.inspect.runs import is_run
from holdfast.run.journal import Now
from holdfast.run.journaling import Journal
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.memory import Memory
from holdfast.storage.storage import JOURNAL
from holdfast.storage.store_place import StorePlace
from holdfast.view.run import run_page
from tests.view.browser import Tab, script
from tests.view.telling import HOSTILE, told


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = LocalPlace(tmp_path_factory.mktemp("run")) / "gpt-7b"
    found.mkdir()
    for entry in told(found)[-4:-1]:
        state = {"model": {"w": torch.zeros(64, 64)}, "step": entry.step}
        holdfast.save(state, found / f"step-{entry.step:09d}", step=entry.step)
    last = next((found / "step-000059500").rglob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    return found


@pytest.fixture(scope="module")
def written(root: Path) -> Path:
    path = root.parent / "run.html"
    path.write_text(run_page(root))
    return path


def shown(tab: Callable[..., Tab], page: Path, **kwargs: Any) -> Any:
    one = tab(**kwargs)
    opened = one.open(page)
    assert not one.network()
    return opened


def data_of(page: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_what_is_told_of_a_run(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    assert page.title() == "gpt-7b · holdfast"
    facts = page.inner_text(".facts")
    for words in (
        "117",
        "2 failed, 1 skipped",
        "3 steps",
        "1 damaged",
        "on 64, 32 ranks",
        "silent",
        "60,100",
        "60,000 saved",
    ):
        assert words in facts, words
    assert "bytes instead of" in page.inner_text(".note.bad")
    rows = page.inner_text("#saves")
    assert "60,000" in rows and "damaged" in rows and "whole" in rows and "swept" in rows


def test_a_point_is_marked_in_all_charts(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    page.hover("#seconds", position={"x": 300, "y": 60})
    hairs = page.eval_on_selector_all(".linked .hair", "all => all.map((e) => e.hidden)")
    assert len(hairs) == 8 and not any(hairs)
    tip = page.inner_text("#tip")
    assert re.search(r"Step [\d,]+", tip) and "took" in tip and "metric" in tip and "ranks" in tip
    page.mouse.move(5, 5)
    assert all(page.eval_on_selector_all(".linked .hair", "all => all.map((e) => e.hidden)"))


def test_a_drag_zooms_all_charts_and_escape_shows_all(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    before = page.locator("#metric canvas").screenshot()
    box = page.locator("#seconds").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=3)
    assert not page.locator("#seconds .brush").get_attribute("hidden")
    page.mouse.up()
    page.wait_for_selector("#reset:not([hidden])")
    page.evaluate("new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")
    assert page.locator("#metric canvas").screenshot() != before, "the others follow"
    page.focus("#metric")
    page.keyboard.press("Escape")
    page.wait_for_selector("#reset[hidden]", state="attached")


def test_by_keyboard(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    page.focus("#metric")
    page.keyboard.press("End")
    assert "Step 60,000" in page.inner_text("#tip") and "Step 60,000" in page.inner_text("[role=status]")
    page.keyboard.press("ArrowLeft")
    assert "Step 59,500" in page.inner_text("#tip")
    page.keyboard.press("+")
    page.wait_for_selector("#reset:not([hidden])")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail:not([hidden])")
    assert "59,500" in page.inner_text("#detail") and "holdfast view" in page.inner_text("#detail")
    page.keyboard.press("Escape")
    page.wait_for_selector("#reset[hidden]", state="attached")
    page.keyboard.press("Escape")
    page.keyboard.press("x")
    assert page.get_attribute("[data-value=time]", "aria-checked") == "true"
    page.keyboard.press("t")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert "60,000" in page.inner_text("#detail h2")


def test_what_failed_is_marked_and_its_text_is_only_text(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    page.click("[data-value=failed]")
    rows = page.locator("#saves .row")
    assert rows.count() == 3
    rows.filter(has_text="failed").first.click()
    # A journal keeps no character that would turn the direction of what follows.
    assert HOSTILE.replace("\u202e", " ") in page.inner_text("#detail .note")
    assert page.title() == "gpt-7b · holdfast" and page.locator("main img").count() == 0
    strip = page.evaluate(
        """() => { const c = document.querySelector('#starts canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        H.css('--bad'); const [r, g, b] = H.css('--bad').match(/\\d+/g).map(Number); let n = 0;
        for (let i = 0; i < d.length; i += 4) if (d[i] === r && d[i + 1] === g && d[i + 2] === b) n += 1; return n; }"""
    )
    assert strip > 40, "two red marks"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(scheme: str, tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written, scheme=scheme)
    page.click("#saves .row")
    assert page.evaluate(script("contrast"))[0][0] >= 4.5
    for width in (1360, 420):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing lies beside the page"


@pytest.mark.slow
def test_a_run_of_ten_thousand_saves(tab: Callable[..., Tab], tmp_path: Path) -> None:
    told(tmp_path, 10_000)
    path = tmp_path / "run.html"
    path.write_text(run_page(tmp_path))
    page = shown(tab, path)
    assert "9,997" in page.inner_text(".facts")
    page.hover("#rate", position={"x": 400, "y": 50})
    assert "Step" in page.inner_text("#tip")


def test_a_root_without_a_journal(tab: Callable[..., Tab], tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", every=1, keep=Keep(last=3), worker="none", journal=False) as manager:
        for step in (1, 2, 3):
            manager.step(step, {"w": torch.zeros(10), "step": step}, metric=float(step))
    path = tmp_path / "run.html"
    path.write_text(run_page(tmp_path / "run"))
    page = shown(tab, path)
    assert "No journal was kept" in page.inner_text("main")
    assert page.locator("#metric").count() == 1 and page.locator("#seconds").count() == 0


def test_what_is_in_the_page(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=1), worker="thread") as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.zeros(10), "step": step})
    data = data_of(run_page(tmp_path))
    assert data["columns"]["step"] == [1, 2] and data["state"] == "ended"
    assert [step[:2] + step[3:4] for step in data["steps"]] == [[2, "step-000000002", "whole"]]
    assert {len(column) for column in data["columns"].values()} == {2}


def test_what_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StorePlace(Memory(), "run")
    for root in (tmp_path / "run", store):
        assert not is_run(root)
        holdfast.save({"w": torch.zeros(3)}, root / "step-1", step=1)
        assert is_run(root) and not is_run(root / "step-1")
    Journal(tmp_path / "new").close(lambda: Now(1, 1.0, 1, 1), 30)
    assert is_run(tmp_path / "new") and not is_run(tmp_path / "new" / JOURNAL)
    page = tmp_path / "out.html"
    assert run(["view", str(tmp_path / "run"), "-o", str(page)]) == Code.FINE
    assert data_of(page.read_text())["columns"]["step"] == [1]
    assert run(["view", str(tmp_path / "run"), "--serve"]) == Code.USAGE
    assert "is a run" in capsys.readouterr().err
