"""Statistics on the page of a checkpoint: columns that sort, the map of norms, layers in order, and narrow windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.view.checkpoint import checkpoint_page, figures
from holdfast.view.server import Served, running
from tests.view.browser import Tab, script
from tests.view.test_checkpoint_page import SELECTED, written

FIRST, LAYERS = "document.querySelector('#tensors .row[aria-rowindex=\"2\"]').textContent", 12
WIDE = ("Name", "Type", "Shape", "Size", "Norm", "Std", "NaN", "Inf")


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = {"tok.weight": torch.randn(50, 8, generator=generator)}
    for layer in sorted(range(LAYERS), key=str):  # 0, 1, 10, 11, 2, …: as other formats list them
        for kind, shape in {"attn.q.weight": (8, 8), "mlp.up.weight": (16, 8), "norm.weight": (8,)}.items():
            blown = 1000 if (layer, kind) == (7, "mlp.up.weight") else 1
            model[f"blocks.{layer}.{kind}"] = blown * torch.randn(*shape, generator=generator)
    model["blocks.3.attn.q.weight"][0, :3] = torch.tensor([math.nan, math.nan, math.inf])
    model["blocks.5.norm.weight"].zero_()
    moments = {name: {"exp_avg_of_a_long_name": weight * 1e-3} for name, weight in model.items()}
    ids = {"seen": torch.tensor([], dtype=torch.int64)}
    values = {"a_value_with_a_rather_long_name": "words " * 12}
    return {"model": model, "optimizer": {"state": moments}, "data": ids, "values": values, "step": 42}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("norms") / "step-42"
    holdfast.save(state(), path, step=42)
    return path


@pytest.fixture(scope="module")
def whole(saved: Path) -> Path:
    """The page with statistics of all tensors."""
    return written(saved.parent, saved, stats="*")


@pytest.fixture
def served(saved: Path) -> Iterator[str]:
    opened = holdfast.open(saved)
    page = Served(lambda: checkpoint_page(opened, served=True), {"statistics": lambda name: figures(opened, name)})
    with running(page) as url:
        yield url


def sort_of(page: Any, column: str) -> str | None:
    return page.get_attribute(f"#tensors [role=columnheader]:has-text('{column}')", "aria-sort")


def test_columns_of_statistics_sort_by_number(tab: Callable[..., Tab], whole: Path) -> None:
    page = tab().open(whole)
    assert tuple(page.locator("#tensors [role=columnheader]").all_text_contents()) == WIDE
    page.click("#tensors button:has-text('Norm')")
    assert sort_of(page, "Norm") == "descending" and "blocks.7.mlp.up.weight" in page.evaluate(FIRST)
    page.click("#tensors button:has-text('Norm')")
    assert sort_of(page, "Norm") == "ascending" and "blocks.5.norm.weight" in page.evaluate(FIRST)
    page.focus("#tensors button:has-text('NaN')")
    page.keyboard.press("Enter")
    assert sort_of(page, "NaN") == "descending" and sort_of(page, "Norm") is None
    row = page.evaluate(FIRST)
    assert "blocks.3.attn.q.weight" in row and row.endswith("21")
    page.click("#tensors button:has-text('Std')")
    for _ in range(2):  # a tensor without elements has no norm: it is last, both ways
        page.click("#tensors button:has-text('Norm')")
        page.keyboard.press("t")
        page.keyboard.press("End")
        assert "seen" in page.text_content("#tensors .row.active")


def test_a_page_without_statistics_has_no_columns_for_them(
    tab: Callable[..., Tab], saved: Path, tmp_path: Path
) -> None:
    page = tab().open(written(tmp_path, saved))
    heads = page.locator("#tensors [role=columnheader]").all_text_contents()
    assert heads == ["Name", "Type", "Shape", "Cells", "Size"] and not page.is_visible("#norms")


def test_the_norm_is_that_of_the_whole_tensor(tab: Callable[..., Tab], whole: Path) -> None:
    page = tab().open(whole)
    weight = state()["model"]["tok.weight"]
    page.fill("#filter", "model/tok.weight")
    page.wait_for_selector(".counted:has-text('1 of')")
    cells = page.locator("#tensors .row >> nth=0").locator("[role=gridcell]").all_text_contents()
    assert float(cells[4]) == pytest.approx(float(weight.double().norm()), rel=1e-4)
    assert float(cells[5]) == pytest.approx(float(weight.double().std(correction=0)), rel=1e-4)


@pytest.mark.slow
def test_the_map_shows_the_layer_that_blew_up(tab: Callable[..., Tab], whole: Path) -> None:
    page = tab().open(whole)
    page.keyboard.press("n")
    press = page.keyboard.press
    for _ in range(4):
        press("ArrowDown")
    tip = page.text_content("#tip")
    assert tip.startswith("model/blocks.3.attn.q.weight") and "2 NaN, 1 infinite" in tip
    for _ in range(4):
        press("ArrowDown")
    press("ArrowRight")
    tip = page.text_content("#tip")
    assert "blocks.7.mlp.up.weight" in tip and "× the median of its kind" in tip
    press("Enter")
    assert page.evaluate(SELECTED) == "model/blocks.7.mlp.up.weight"
    assert "blocks.7.mlp.up" in page.text_content("#tensors .row[aria-selected=true]")
    key = page.text_content(".scale")
    assert "log scale" in key and "NaN or infinite" in key
    colours = page.evaluate(script("norms"))
    assert len(colours) == LAYERS + 1
    assert len(set(colours[1:])) > 3 and colours.count(colours[8]) == 1, "one row has a colour of its own"
    for choice in ("against its kind", "optimizer"):
        page.click(f".card:has(#norms) button:has-text('{choice}')")
    assert "10 times" in page.text_content(".scale")
    page.focus("#norms")
    press("ArrowDown")
    assert "exp_avg_of_a_long_name" in page.text_content("#tip")


def test_a_click_on_the_map_goes_to_the_tensor(tab: Callable[..., Tab], whole: Path) -> None:
    page = tab(width=768).open(whole)
    box = page.evaluate(
        "(() => { const box = document.querySelector('#norms').getBoundingClientRect(); return box.height; })()"
    )
    page.click("#norms", position={"x": 200, "y": box - 10})  # the last row
    assert "blocks.11" in page.evaluate(SELECTED)
    assert page.evaluate("document.querySelector('#panel').getBoundingClientRect().top < innerHeight")


@pytest.mark.parametrize(
    "name, place",
    [
        ("model/blocks.3.attn.q.weight", ["blocks.3", "attn.q.weight"]),
        ("model/layers.0.experts.7.w1", ["layers.0", "experts.*.w1"]),
        ("optimizer/state/h.2.w.weight/exp_avg", ["state/h.2", "w.weight/exp_avg"]),
        ("optimizer/state/4/exp_avg", ["state/4", "exp_avg"]),
        ("model/tok.weight", ["tok", "weight"]),
        ("model/list.3", ["list.3", "–"]),
        ("model/h[4].w", ["h[4", "w"]),
        ("w", ["state", "w"]),
    ],
)
def test_where_a_tensor_stands_on_the_map(tab: Callable[..., Tab], whole: Path, name: str, place: list[str]) -> None:
    page = tab().open(whole)
    tensor = {"name": name, "section": name.partition("/")[0] if "/" in name else "state"}
    assert page.evaluate("(tensor) => H.placed(tensor)", tensor) == place


def test_the_treemap_keeps_the_order_of_layers(tab: Callable[..., Tab], whole: Path) -> None:
    page = tab().open(whole)
    sizes = [100 + 40 * (layer % 3) for layer in range(LAYERS)]
    laid = page.evaluate(script("strips"), sizes)
    assert laid["kinds"] == ["blocks", "head"]
    placed = laid["placed"]
    assert [label.partition(".")[0] for label, *_ in placed] == [str(layer) for layer in range(LAYERS)]
    assert [row[0] for row in sorted(placed, key=lambda row: (round(row[2]), row[1]))] == [row[0] for row in placed]
    for (*_, w, h), size in zip(placed, sizes, strict=True):
        assert w * h == pytest.approx(400 * 300 * size / sum(sizes), rel=1e-6)
    heights = {round(h, 6) for *_, h in page.evaluate(script("strips"), [100] * 50)["placed"]}
    assert max(heights) < 2 * min(heights), "no thin line at the end"
    names = ["b.10", "b.2", "head", "b.1", "a10b", "a9b"]
    assert page.evaluate("(names) => H.ordered(names, (name) => name)", names) == [
        "b.1", "b.2", "b.10", "head", "a10b", "a9b",
    ]  # fmt: skip


def test_a_server_is_asked_for_all_statistics(tab: Callable[..., Tab], served: str) -> None:
    page = tab().open(served)
    assert not page.is_visible("#norms")
    page.fill("#filter", "model/*.attn.q.weight")
    page.click(f"button:has-text('statistics of {LAYERS} tensors')")
    page.wait_for_selector("button:has-text('Stop')", state="hidden")
    page.click("#tensors button:has-text('Inf')")
    assert "blocks.3.attn.q.weight" in page.evaluate(FIRST)
    assert page.is_visible("#norms") and "not read" in page.text_content(".scale")
    page.fill("#filter", "")
    page.wait_for_selector("button:has-text('for statistics of')")


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("stats", ["*", None])
@pytest.mark.fast_cases("None-768")
def test_no_window_is_too_narrow(
    tab: Callable[..., Tab], saved: Path, tmp_path: Path, width: int, stats: str | None
) -> None:
    page = tab(width=width, height=800).open(written(tmp_path, saved, stats=stats))
    faults = page.evaluate(script("outside"))
    if width > 360:  # a name in a wide table may lose its beginning: the panel shows all of it
        faults = [fault for fault in faults if fault[0] != "cut"]
    assert not faults
    page.evaluate("document.querySelector('#tensors .rows').scrollLeft = 1e6")
    page.wait_for_timeout(100)
    first, head = (page.locator(f"#tensors {row} > :last-child").first.bounding_box() for row in (".row", ".heads"))
    assert head["x"] == pytest.approx(first["x"], abs=1) and first["x"] + first["width"] <= width
