"""The page of a checkpoint in a real browser: what it shows, by pointer and by keyboard, by day and by night."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.ondisk.box import Box
from holdfast.storage.memory import Memory
from holdfast.storage.store import Got
from holdfast.storage.store_place import StorePlace
from holdfast.view.checkpoint import checkpoint_page
from holdfast.view.traces import Timeline
from tests.damaging import flip
from tests.view.browser import Tab, script
from tests.view.making import drafted, llama, record, rows
from tests.view.test_page import HOSTILE

SELECTED = "document.querySelector('#panel .name').textContent"


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(400, 30)
    weight[3, 4], weight[5, 6] = float("nan"), float("inf")
    return {
        "model": {"tok.weight": weight, "head.weight": torch.randn(64, 30), "norm.bias": torch.zeros(30)},
        "optimizer": {"exp_avg": torch.ones(500)},
        "scheduler": {"last_lr": [0.25], "name": "<b>cosine</b>"},
        "seen": holdfast.PerRank(["shard-7", 11]),
        "step": 42,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    (folder / "config.yaml").write_text("width: 30\n")
    holdfast.save(state(), folder / "step-42", step=42, files={"config.yaml": folder / "config.yaml"})
    return folder / "step-42"


def written(folder: Path, checkpoint: Checkpoint | Path, **kwargs: Any) -> Path:
    opened = holdfast.open(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    path = folder / "page.html"
    path.write_text(checkpoint_page(opened, **kwargs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a state of 80 GB on 64 ranks."""
    folder = tmp_path_factory.mktemp("large")
    return written(folder, llama(folder / "step-1200"), look=False)


def text(page: Any, selector: str) -> str:
    return str(page.text_content(selector))


@pytest.mark.slow
def test_what_is_told_of_a_whole_checkpoint(tab: Callable[..., Tab], saved: Path, tmp_path: Path) -> None:
    one = tab()
    page = one.open(written(tmp_path, saved))
    facts = text(page, ".facts")
    assert "42" in facts and "holdfast" in facts and "whole" in facts and "not signed" in facts and not one.network()
    assert page.title().startswith("step-42")
    values = text(page, "main")
    assert "<b>cosine</b>" in values and "0.25" in values and "shard-7" in values and "config.yaml" in values
    assert page.get_attribute("#tensors", "aria-rowcount") == "5"


@pytest.mark.slow
def test_statistics_are_in_the_page_if_it_was_made_with_them(
    tab: Callable[..., Tab], saved: Path, tmp_path: Path
) -> None:
    page = tab().open(written(tmp_path, saved, stats="model/*"))
    assert page.evaluate(SELECTED) == "model/tok.weight"
    statistics = text(page, ".statistics")
    assert "NaN1" in statistics and "Infinite1" in statistics
    assert page.locator(".statistics rect.bar").count() == 60
    page.hover(".statistics rect[fill=transparent] >> nth=30")
    assert "elements" in text(page, ".tip")
    page.fill("#filter", "exp_avg")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate(SELECTED) == "optimizer/exp_avg"
    assert "--stats optimizer/exp_avg" in text(page, ".command >> nth=0")


def test_damage_is_marked(tab: Callable[..., Tab], saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "bad")
    flip(next((tmp_path / "bad" / "model").iterdir()), 40)  # in the header
    page = tab().open(written(tmp_path, tmp_path / "bad"))
    assert "damaged" in text(page, ".facts") and "altered header" in text(page, ".note.bad")
    assert "hit by damage" in text(page, "#panel")
    assert page.locator(".note.bad li").count() == 1, "one fault of one file, however many tensors it hits"


@pytest.mark.slow
def test_what_has_no_tensor_has_no_empty_frames(tab: Callable[..., Tab], tmp_path: Path) -> None:
    holdfast.save({"step": 3}, tmp_path / "bare")
    page = tab().open(written(tmp_path, tmp_path / "bare"))
    assert "no tensor" in text(page, ".note") and not page.locator("#map, #tensors, #panel").count()


@pytest.mark.slow
def test_the_treemap_by_pointer(tab: Callable[..., Tab], large: Path) -> None:
    page = tab().open(large)
    box = page.locator("#map").bounding_box()
    page.hover("#map", position={"x": box["width"] * 0.6, "y": 60})
    tip = text(page, ".tip")
    assert "optimizer" in tip and "Click to" in tip
    crumbs = text(page, ".crumbs")
    page.click("#map", position={"x": box["width"] * 0.6, "y": 10})  # the title of a group
    assert text(page, ".crumbs") == "state›optimizer.state" != crumbs
    page.click(".crumbs button >> nth=0")
    assert text(page, ".crumbs") == "state"
    page.click("#map", position={"x": box["width"] - 40, "y": box["height"] - 12})  # the last of the last group
    assert page.evaluate(SELECTED).endswith("output.weight/exp_avg_sq")
    before = page.screenshot(clip=box)
    page.click("text=type")
    assert "bfloat16" in text(page, ".key")
    page.mouse.move(1, 1)
    page.click("text=size")
    page.wait_for_selector(".key li:nth-child(5)")
    assert page.screenshot(clip=box) != before


@pytest.mark.slow
def test_all_of_it_by_keyboard(tab: Callable[..., Tab], large: Path) -> None:
    page = tab().open(large)
    press = page.keyboard.press
    seen = []
    for _ in range(13):
        press("Tab")
        seen.append(page.evaluate(script("focused")))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen[-1]
    assert seen[:3] == ["A skip", "keys", "theme"]
    assert [s for s in seen if s in ("filter", "map", "Tensors", "panel")] == ["filter", "map", "Tensors"]
    press("m")
    press("ArrowRight")
    press("Enter")
    assert "optimizer" in text(page, ".crumbs")
    press("ArrowRight")
    assert not page.evaluate("document.querySelector('.tip').hidden")
    press("Enter")
    inside = text(page, ".crumbs")
    assert inside.count("›") == 2
    press("Escape")
    press("Escape")
    assert text(page, ".crumbs") == "state"
    press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("layers.7.*w?.weight")
    page.keyboard.type("*")
    page.locator(".counted").filter(has_text=re.compile("^0 of")).wait_for()
    press("Escape")
    page.keyboard.type("model/layers.7.*w?.weight")
    page.wait_for_selector(".counted:has-text('7 of 873')")
    press("ArrowDown")
    press("End")
    press("Enter")
    assert page.evaluate(SELECTED).startswith("model/layers.7.attention")
    press("Home")
    press("Enter")
    assert page.evaluate(SELECTED).startswith("model/layers.7.feed_forward")
    press("?")
    assert page.locator("dialog[open] kbd").count() >= 6
    press("Escape")
    press("t")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Tensors"


def test_columns_sort(tab: Callable[..., Tab], large: Path) -> None:
    page = tab().open(large)
    first = "document.querySelector('#tensors .row[aria-rowindex=\"2\"]').textContent"
    page.click("#tensors .heads button:has-text('Name')")
    assert page.evaluate(first).startswith("model/layers.0.attention.wk")
    page.click("#tensors .heads button:has-text('Name')")
    assert page.evaluate(first).startswith("optimizer/state/tok_embeddings")
    assert page.get_attribute("#tensors [role=columnheader] >> nth=0", "aria-sort") == "descending"


@pytest.mark.slow
def test_shards_are_where_the_manifest_says(tab: Callable[..., Tab], tmp_path: Path) -> None:
    quarters = [Box((a, b), (a + 3 and 3, 5 if b else 4)) for a in (0, 3) for b in (0, 4)]
    deep = [Box((a, b, c), (2, 1, 3)) for a in (0, 2) for b in (0, 1) for c in (0, 3)]
    odd = [Box((0, 0), (1, 10)), Box((1, 0), (1, 4)), Box((1, 4), (1, 6)), Box((2, 0), (8, 10))]
    tensors = {
        "model/quarters": record("float32", (6, 9), quarters, [3, 2, 1, 0]),
        "model/deep": record("float32", (4, 2, 6), deep, [0, 1, 2, 3, 0, 1, 2, 3]),
        "model/odd": record("float32", (10, 10), odd, [0, 1, 2, 3]),
        "model/rows": rows("float32", (8,), 4),
        "model/mesh": record("float32", (4096, 16), [Box((i, 0), (1, 16)) for i in range(4096)], [0, 1, 2, 3] * 1024),
        "model/scalar": record("float32", (), [Box((), ())], [2]),
        "model/empty": record("float32", (0, 4), [], []),
    }  # fmt: skip
    opened = holdfast.open(drafted(tmp_path / "c", tensors, ranks=4))
    page = tab().open(written(tmp_path, opened, look=False))
    for name, tensor in tensors.items():
        raw = [name, tensor.dtype, list(tensor.shape), tensor.nbytes, checkpoint_cells(opened, name), tensor.files]
        laid = page.evaluate(script("cells"), raw)
        assert laid["boxes"] == [[list(b.offsets), list(b.lengths), i] for b, i in tensor.boxes()], name
        assert laid["count"] == len(tensor.boxes())
        assert laid["area"] == pytest.approx(0 if name == "model/empty" else 1)  # they fill the drawing once
    page.fill("#filter", "model/quarters")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert "saved in 4 cells by 4 ranks" in text(page, "#panel")
    page.hover(".boxes", position={"x": 10, "y": 10})
    assert "rank 3" in text(page, ".tip") and "[0:3, 0:4]" in text(page, ".tip")
    page.focus(".boxes")
    page.keyboard.press("ArrowRight")
    assert "rank 2" in text(page, ".tip")


def checkpoint_cells(opened: Checkpoint, name: str) -> Any:
    import msgspec

    return msgspec.to_builtins(opened.records[name].cells)


def test_hostile_names_and_values(tab: Callable[..., Tab], tmp_path: Path) -> None:
    model = {name: torch.ones(n + 1) for n, name in enumerate(HOSTILE)}
    values = {f"v{n}": name for n, name in enumerate(HOSTILE)} | {name: n for n, name in enumerate(HOSTILE)}
    (tmp_path / "a").write_text("x")
    holdfast.save(
        {"model": model, "values": values}, tmp_path / "c", files={"<img src=x onerror=alert(1)>": tmp_path / "a"}
    )
    opened = holdfast.open(tmp_path / "c")
    trace = Timeline(
        [("</script><script>alert(1)</script>", "<b>")], ["<img onerror=alert(1)>"], [(0, 0, 0.0, 1.0, "<i>")], 0
    )
    page = tab().open(written(tmp_path, opened, stats="*", timeline=trace))
    assert page.evaluate("document.querySelectorAll('main img, main script, main b > *, main i > *').length") == 0
    page.keyboard.press("t")
    for _ in HOSTILE:  # each tensor is chosen once
        page.keyboard.press("Enter")
        assert page.evaluate(SELECTED) in opened.tensors
        page.keyboard.press("ArrowDown")
    assert page.title().endswith("holdfast")


@pytest.mark.slow
def test_contrast_by_day_and_by_night(tab: Callable[..., Tab], saved: Path, tmp_path: Path) -> None:
    path = written(tmp_path, saved, stats="*")
    for scheme in ("light", "dark"):
        page = tab(scheme=scheme).open(path)
        page.hover("#map", position={"x": 30, "y": 60})
        found = page.evaluate(script("contrast"))
        assert len(found) > 60 and found[0][0] >= 4.5, found[:3]
        # And what is written on the canvas: ink on every colour that a kind may have.
        assert page.evaluate(script("inks")) >= 4.5


@pytest.mark.slow
def test_ten_thousand_tensors(tab: Callable[..., Tab], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        f"model/layers.{n // 100}.experts.{n % 100}.w.weight": rows("bfloat16", (1024 + n, 64), 16)
        for n in range(10_000)
    }
    path = written(tmp_path, drafted(tmp_path / "c", tensors, ranks=16), look=False)
    page = tab().open(path)
    assert page.evaluate("document.querySelectorAll('*').length") < 900
    scrolled = page.evaluate(script("scroll"))
    filtered = page.evaluate(script("filter"))
    assert page.evaluate("document.querySelectorAll('*').length") < 900
    assert page.get_attribute("#tensors", "aria-rowcount") == "10001"
    page.keyboard.press("t")
    page.keyboard.press("End")
    assert page.evaluate("document.querySelector('.row.active').getAttribute('aria-rowindex')") == "10001"
    with capsys.disabled():
        took = [
            f"{max(times):.0f} ms at most, {sorted(times)[len(times) // 2]:.0f} ms in the middle"
            for times in (scrolled, filtered)
        ]
        print(
            f"\n10,000 tensors, {path.stat().st_size / 1e6:.1f} MB; two frames: a scroll {took[0]}, a filter {took[1]}"
        )


class Counting(Memory):
    """Counts what is read of it."""

    read: int = 0

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        found = super().get(key, begin, end)
        self.read += len(found.data)
        return found


def test_a_page_reads_only_what_it_shows(tmp_path: Path) -> None:
    store = Counting()
    holdfast.save(
        {"model": {"big": torch.ones(1 << 20), "small": torch.ones(9)}, "step": 1}, StorePlace(store, "run/step-1")
    )
    files = {entry.key: entry.nbytes for entry in store.list("run", deep=True).files}
    written_bytes, store.read = sum(files.values()), 0
    checkpoint_page(holdfast.open(StorePlace(store, "run/step-1")), look=False)
    manifest = next(n for key, n in files.items() if key.endswith("manifest.json"))
    assert store.read == manifest
    store.read = 0
    checkpoint_page(holdfast.open(StorePlace(store, "run/step-1")))
    assert manifest < store.read < manifest + 16_384 < written_bytes
    store.read = 0
    checkpoint_page(holdfast.open(StorePlace(store, "run/step-1")), stats="model/small")
    assert store.read < manifest + 2 * 16_384


@pytest.mark.slow
def test_pages_of_other_formats(tmp_path: Path, tab: Callable[..., Tab]) -> None:
    holdfast.save({"model": {"w": torch.ones(8, 8), "b": torch.ones(8)}, "step": 3}, tmp_path / "c")
    for to in ("dcp", "torch", "huggingface"):
        target = tmp_path / f"as.{to}"
        holdfast.convert(tmp_path / "c", target, to=to)
        page = tab().open(written(tmp_path, target, stats="*"))
        assert (
            "format keeps no sums" in text(page, ".facts") and int(page.get_attribute("#tensors", "aria-rowcount")) >= 3
        )


@pytest.mark.slow
def test_what_is_tied_is_told_in_both_themes(tab: Callable[..., Tab], tmp_path: Path) -> None:
    tensors = {"model/w": record("float32", (4,), [Box((0,), (4,))], [0])}
    path = written(tmp_path, drafted(tmp_path / "c", tensors, aliases={"model/head": "model/w"}), look=False)
    page = tab().open(path)
    for _ in range(3):
        assert "Also calledmodel/head" in page.text_content("#panel")
        page.click("#theme")


@pytest.mark.slow
def test_a_state_of_empty_tensors(tab: Callable[..., Tab], tmp_path: Path) -> None:
    holdfast.save({"model": {"none": torch.zeros(0, 3), "nothing": torch.zeros(0)}}, tmp_path / "c")
    page = tab().open(written(tmp_path, tmp_path / "c"))
    for key in ("c", "m", "t", "ArrowDown", "Enter", "/", "Escape", "Escape"):
        page.keyboard.press(key)
    assert "it has no elements" in page.text_content("#panel")
