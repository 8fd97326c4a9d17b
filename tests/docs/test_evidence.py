"""Figures of the pages link to the runs that they come from, and the table of runs is what the rows say."""

from __future__ import annotations

import pytest

from evidence import page
from evidence.runs import RUNS
from tests.docs.figures import figures, links
from tests.docs.pages import ROOT

WITHOUT = ("docs/format.md", "docs/glossary.md", "docs/gpu.md")
"""Two define, and the figures of the third come from docs/gpu.json."""
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

NOT_MEASURED = {
    ("docs/convert.md", "256 MiB"): "how often progress is recorded",
    ("docs/incremental.md", "64 MiB"): "thresholds of the code",
    ("docs/stop.md", "30 seconds"): "of torchrun and Kubernetes",
    ("docs/stores.md", "100 GiB"): "a setting: the size of the cache",
    ("docs/stores.md", "80 %"): "a setting: the size of the cache",
    ("docs/values.md", "1 MiB"): "a threshold of the code",
}
"""Figures that are no claims, where no word beside them says so."""


def test_the_table_of_runs_is_what_the_rows_give() -> None:
    text = page.PAGE.read_text()
    assert page.with_evidence(text) == text, "the rows have changed: run make evidence"


def test_every_figure_links_to_the_run_that_it_comes_from() -> None:
    bare = [
        f"{figure.page}:{figure.line}: {figure.text}"
        for name in PAGES
        if name not in WITHOUT
        for figure in figures(name, (ROOT / name).read_text())
        if not figure.runs and not figure.is_setting and (name, figure.text) not in NOT_MEASURED
    ]
    assert not bare, "link their sections to a run, as in [make bench](trust.md#run-bench):\n" + "\n".join(bare)


def test_the_exceptions_are_still_there() -> None:
    there = {(name, figure.text) for name in PAGES for figure in figures(name, (ROOT / name).read_text())}
    assert set(NOT_MEASURED) <= there


def test_links_lead_to_runs() -> None:
    wrong = {(name, run) for name in PAGES for run in links((ROOT / name).read_text()) if run not in RUNS}
    assert not wrong
    anchors = page.PAGE.read_text()
    assert all(anchors.count(f'<a id="{page.anchor(name)}"></a>') == 1 for name in RUNS)


def found(text: str) -> list[str]:
    return [figure.text for figure in figures("page.md", text) if not figure.runs and not figure.is_setting]


@pytest.mark.parametrize(
    "text",
    [
        "A save takes 0.75 s here.",
        "Training waits 8 ms.",
        "It is 3.0× as fast.",
        "It reaches 0.82 of the raw rate.",
        "It needs 66 MiB.",
        "Sums run at 30 GB/s.",
        "It uses 0.3 CPU seconds per rank.",
        "A state shrinks by 17 %.",
        "It is 2.5 times as fast.",
        "It takes 21.0 s.",
        "| save | **0.75 s** | 2.28 |",
        "One line\nand 12 MB in the next.",
    ],
)
def test_the_finder_sees_claims(text: str) -> None:
    assert len(found(text)) == 1
    assert found(f"# One\n\n[this run](trust.md#run-bench)\n\n# Another\n\n{text}")
    assert not found(f"# One\n\nFrom [this run](trust.md#run-bench).\n\n{text}")


@pytest.mark.parametrize(
    "text",
    [
        "`timeout=30 s` in code",
        "```python\nwait(3)  # 3 s\n```",
        "The default is 25 seconds.",
        "A block has at most 8 MiB.",
        "Checksums of each block of 8 MiB.",
        "64 replicas × 256 shards",
        "step-7 of 12 steps on 4 ranks with torch 2.13.0",
        "see [scale](scale.md#16-s)",
    ],
)
def test_the_finder_passes_over_what_is_no_claim(text: str) -> None:
    assert found(text) == []


def test_the_table_of_runs_needs_no_link_to_itself() -> None:
    assert found('# Runs\n\n|<a id="run-soak"></a>soak|passed|60 min|') == []
    assert found("# Runs\n\n|soak|passed|60 min|") == ["60 min"]


def test_a_default_excuses_its_own_sentence_alone() -> None:
    assert found("The default is 25 seconds. A save takes 3 s.") == ["3 s"]


def test_the_finder_knows_the_line_and_the_runs() -> None:
    (figure,) = figures("page.md", "# A\n\nText.\nMore. It takes 3 s: [run](docs/trust.md#run-soak).\n")
    assert figure.line == 4 and figure.runs == ("soak",)
    assert links("[a](#run-soak) and [b](trust.md#run-test-torch-2.10)") == ["soak", "test-torch-2.10"]
