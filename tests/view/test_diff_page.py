"""The page of a diff: its map, its table and the numbers in it, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

import holdfast
from holdfast.cli.app import run
from holdfast.cli.errors import Code
from holdfast.inspect.compare import Difference, compare
from holdfast.view import page as page_module
from holdfast.view.diff import SCRIPTS, contents, diff_page, placed
from tests.view.browser import Tab, script
from tests.view.test_run_page import data_of, shown

LAYERS = 6


def state_of(changed: bool) -> dict[str, Any]:
    first, then = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model: dict[str, torch.Tensor] = {"tok.weight": torch.randn(20, 8, generator=first)}
    for layer in range(LAYERS):
        for kind, shape in {"attn.q.weight": (8, 8), "mlp.up.weight": (16, 8), "norm.weight": (8,)}.items():
            weight = torch.randn(*shape, generator=first)
            if changed and kind != "norm.weight":
                weight = weight + torch.randn(*shape, generator=then) * 0.001 * 3.0**layer
            model[f"layers.{layer}.{kind}"] = weight
    for expert in range(3):
        model[f"moe.0.experts.{expert}.w"] = torch.ones(4) * (1.0 + 0.1 * expert * changed)
    if changed:
        model["layers.1.attn.q.weight"] = torch.zeros(8, 9)
        model["layers.2.mlp.up.weight"][0, 0] = float("nan")
        model["layers.3.mlp.up.weight"] = model["layers.3.mlp.up.weight"].to(torch.bfloat16)
        model["new.weight"] = torch.zeros(3)
    else:
        model["old.weight"] = torch.zeros(3)
    return {"model": model, "lr": 0.1 + changed, "step": 2 if changed else 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    for step, changed in ((1, False), (2, True)):
        holdfast.save(state_of(changed), folder / f"step-{step}", step=step)
    return folder / "step-1", folder / "step-2"


@pytest.fixture(scope="module")
def written(pair: tuple[Path, Path]) -> Path:
    path = pair[0].parent / "diff.html"
    assert run(["view", str(pair[0]), "--against", str(pair[1]), "-o", str(path)]) == Code.FINE
    return path


@pytest.mark.parametrize(
    "name, kind, layer",
    [
        ("model/layers.12.attn.q.weight", "model/layers.*.attn.q.weight", 12),
        ("model/layers.3.experts.7.w1", "model/layers.*.experts.*.w1", 3),
        ("optimizer/state/layers.0.w/exp_avg", "optimizer/state/layers.*.w/exp_avg", 0),
        ("model/norm2.weight", "model/norm2.weight", None),
        ("model/h[4]", "model/h[*]", 4),
        ("step", "step", None),
        ("model/99999999999999", "model/99999999999999", None),
        ("model/١.w", "model/١.w", None),
    ],
)
def test_where_a_name_stands(name: str, kind: str, layer: int | None) -> None:
    assert placed(name) == (kind, layer)


def test_what_is_told_of_a_pair(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    facts = page.inner_text(".facts")
    for words in ("step 1", "step 2", "1 number NaN or infinite", "of 26 names"):
        assert words in facts, words
    rows = page.inner_text("#names")
    assert "other shape" in rows and "changed" in rows
    page.click("[data-value=odd]")
    expect(page.locator("#names .row")).to_have_count(4)
    rows = page.text_content("#names")
    assert "only in A" in rows and "only in B" in rows and "other type" in rows and "model/old.weight" in rows


def test_the_map_tells_and_opens_a_tensor(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    words = page.inner_text("#tip")
    assert "attn.q.weight" in words and page.inner_text("[role=status]") in words.replace("\n", ", ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail:not([hidden])")
    assert "attn.q.weight" in page.inner_text("#detail h2")
    selected = page.text_content("#names .row[aria-selected=true]")
    assert "attn.q.weight" in selected
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail[hidden]", state="attached")
    page.hover("#map", position={"x": 500, "y": 60})
    assert page.is_visible("#tip")


@pytest.mark.slow
def test_several_in_one_place_and_what_they_are(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    page.fill("#filter", "experts.2")
    page.locator("#names .row").first.click()
    assert "In the same place: 2" in page.inner_text("#detail")
    page.click("#detail .list button >> nth=1")
    assert "experts.1" in page.inner_text("#detail h2")


def test_a_name_reads_from_its_beginning_to_its_end(tab: Callable[..., Tab], written: Path) -> None:
    page = tab().open(written)
    assert page.locator("#names .cut").count() > 5
    assert page.evaluate(script("reads_forward"), "#names .cut")


@pytest.mark.slow
def test_the_colour_can_say_something_else(tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written)
    pictures = []
    for measure in ("relative", "angle", "largest"):
        page.click(f"[data-value={measure}]")
        page.evaluate("new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")
        pictures.append(page.locator("#map canvas").screenshot())
        assert {"relative": "relative change", "angle": "angle", "largest": "largest"}[measure] in page.inner_text(
            ".scale"
        )
    assert len(set(pictures)) == 3
    page.keyboard.press("m")
    assert page.get_attribute("[data-value=relative]", "aria-checked") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.fast_cases("dark")
def test_it_can_be_read(scheme: str, tab: Callable[..., Tab], written: Path) -> None:
    page = shown(tab, written, scheme=scheme)
    page.click("#names .row")
    assert page.evaluate(script("contrast"))[0][0] >= 4.5
    for width in (1360, 420):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing lies beside the page"


@pytest.mark.slow
def test_two_that_are_the_same(tab: Callable[..., Tab], pair: tuple[Path, Path], tmp_path: Path) -> None:
    one = holdfast.open(pair[0])
    path = tmp_path / "page.html"
    path.write_text(diff_page(one, one))
    page = shown(tab, path)
    assert "Both hold the same by their recorded checksums" in page.inner_text("main")


def test_the_numbers_in_the_page_are_those_of_compare(pair: tuple[Path, Path], written: Path) -> None:
    a, b = map(holdfast.open, pair)
    found = {one.name: one for one in compare(a, b)}
    data = data_of(written.read_text())
    assert {row[0] for row in data["rows"]} == set(found)
    for name, status, nbytes, relative, cosine, largest, *_ in data["rows"]:
        one = found[name]
        assert (status, nbytes, relative, cosine, largest) == (
            one.status, one.nbytes, one.relative, one.cosine, one.largest,
        )  # fmt: skip
    assert contents(a, b, found.values())["kinds"] == data["kinds"]


@pytest.mark.slow
def test_ten_thousand_names(tab: Callable[..., Tab], pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = (
        Difference(f"model/layers.{n % 100}.part{n // 100}.weight", "changed", 8, 0.1, 0.1, 0.9, 1.0, 1.0, n / 1e4)
        for n in range(10_000)
    )
    path = tmp_path / "page.html"
    a, b = map(holdfast.open, pair)
    path.write_text(page_module.page("large", SCRIPTS, contents(a, b, made)))
    page = shown(tab, path)
    assert "of 10,000 names" in page.inner_text(".facts")
    page.fill("#filter", "layers.7.part3.")
    expect(page.locator("#names .row")).to_have_count(1)


@pytest.mark.slow
def test_a_map_of_thousands_of_columns_and_many_sections(tab: Callable[..., Tab], pair: tuple[Path, Path]) -> None:
    """States of optimizers by number, as other libraries save them: wider than a canvas may be."""
    names = [f"part{n % 12}/{'abc'[n // 12 % 3]}.{n}.w[0]" for n in range(12_000)]
    found = [Difference(name, "changed", 4, 0.1, 0.1, 0.9, 1.0, 1.0, 1.0) for name in names]
    data = contents(holdfast.open(pair[0]), holdfast.open(pair[1]), found)
    path = pair[0].parent / "wide.html"
    path.write_text(page_module.page("wide", SCRIPTS, data))
    page = shown(tab, path)
    assert page.evaluate("document.querySelector('#map canvas').width") <= 32_767
    told = page.evaluate(script("painted"))
    assert told == {"rows": 36, "painted": True}
    page.click("#names .row")
    assert ".w[[]0]'" in page.text_content("#detail .command")
