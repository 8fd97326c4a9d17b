"""Results of the simulator: its cells as rows, the bars they are held to, tables for a terminal and for docs/scale.md.

Called by the simulator at its end. Never computes a cost: the cells have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.bar import Bar
from benchmarks.report import show_bars, tell_facts
from benchmarks.scale_dcp import DcpCost
from benchmarks.scale_load import LoadCost
from benchmarks.scale_save import SaveCost

MIB = 1 << 20


@dataclass
class Cell:
    """One model on one sharding: a first save, a later one, and restarts on several numbers of ranks."""

    model: str
    sharding: str
    ranks: int
    nbytes: int
    save: SaveCost
    loads: list[LoadCost] = field(default_factory=list)
    dcp: DcpCost | None = None
    mesh: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.sharding}"

    def plain(self) -> dict[str, Any]:
        """For JSON: what was counted and what follows from it."""
        cost = self.save
        follows = {
            "first_save_s": cost.first_save_s,
            "first_rank_s": cost.first_rank_s,
            "manifest_share": cost.manifest_share,
        }
        return {**asdict(self), "save": {**asdict(cost), **follows}}


def judge(cells: Sequence[Cell]) -> list[Bar]:
    """The bars, each by the worst cell of the largest number of ranks."""
    most = max(cell.ranks for cell in cells)
    large = [cell for cell in cells if cell.ranks == most]
    costs = [cell.save for cell in large]
    eighth = [load for cell in large for load in cell.loads if 8 * load.ranks == most]
    at = f"at {most:,} ranks: "
    return [
        Bar(at + "plan of one rank, first save", max(c.first_save_s for c in costs), most=1.0, unit=" s"),
        Bar(at + "its memory", max(c.plan_bytes for c in costs) / MIB, most=100, unit=" MiB"),
        Bar(at + "plan of one rank, later saves", max(c.later_s for c in costs) * 1e3, most=10, unit=" ms"),
        Bar(at + "longest message when nothing changed, bytes per rank", _message(large, most), most=64, unit=""),
        Bar(at + "manifest / 100 bytes per tensor and file", max(c.manifest_share for c in costs), most=1.0),
        Bar(at + "manifest, decoded", max(c.decode_s for c in costs), most=0.3, unit=" s"),
        Bar(
            at + "bytes written, most / the best balance",
            max(c.balance / c.best_balance for c in costs),
            most=1.05,
        ),
        Bar(at + "restart on an eighth, plan of one rank", _most([x.plan_s for x in eighth]), most=1.0, unit=" s"),
        Bar(at + "… bytes read / needed, with headers", _most([x.read for x in eighth]), most=1.02),
    ]


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _message(cells: Sequence[Cell], ranks: int) -> float:
    """A note stands for one rank, the answer for all of them."""
    return max(max(c.save.later_note_bytes, c.save.later_answer_bytes / ranks) for c in cells)


_SAVE = (
    "ranks", "layouts", "plan of a rank\nfirst ms", "memory\nMiB", "later\nms",
    "data files\nms", "later note\nbytes",
    "first rank\nms", "manifest\nKiB", "bytes a tensor\nand file", "decode\nms", "most over mean\nbytes written",
)  # fmt: skip
_LOAD = ("saved by", "loaded by", "plan ms", "files", "requests", "headers over\nneeded", "read over\nneeded")
_DCP = (
    "ranks", "local plan\nms", "global plan\ns", "a rank's plan\nKiB", "metadata\nKiB",
    "holdfast: plan\nms", "first rank\nms", "manifest\nKiB",
)  # fmt: skip


def _save_row(cell: Cell) -> list[str]:
    c = cell.save
    per = c.manifest_bytes / (c.tensors + c.files)
    best = f" ({c.best_balance:.3f})" if c.best_balance > 1.0005 else ""
    return [
        f"{cell.ranks:,}", str(c.layouts), f"{c.first_save_s * 1e3:.0f}", f"{c.plan_bytes / MIB:.1f}",
        f"{c.later_s * 1e3:.1f}",
        f"{c.images_s * 1e3:.0f}", str(c.later_note_bytes), f"{c.first_rank_s * 1e3:.0f}",
        f"{c.manifest_bytes / 1024:,.0f}", f"{per:.0f}", f"{c.decode_s * 1e3:.0f}", f"{c.balance:.3f}{best}",
    ]  # fmt: skip


def _load_row(cell: Cell, load: LoadCost) -> list[str]:
    return [
        f"{cell.ranks:,}", f"{load.ranks:,}", f"{load.plan_s * 1e3:.0f}", str(load.files), f"{load.requests:,}",
        f"{load.headers:.4f}", f"{load.read:.4f}",
    ]  # fmt: skip


def _dcp_row(cell: Cell, dcp: DcpCost) -> list[str]:
    c = cell.save
    return [
        f"{cell.ranks:,}", f"{dcp.local_s * 1e3:.0f}", f"{dcp.global_s:.2f}", f"{dcp.plan_bytes / 1024:,.0f}",
        f"{dcp.metadata_bytes / 1024:,.0f}", f"{c.first_save_s * 1e3:.0f}", f"{c.first_rank_s * 1e3:.0f}",
        f"{c.manifest_bytes / 1024:,.0f}",
    ]  # fmt: skip


def tables(cells: Sequence[Cell]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and rows of each table."""
    found: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for name in dict.fromkeys(cell.name for cell in cells):
        of = [cell for cell in cells if cell.name == name]
        size = (
            f"{of[0].nbytes / 1e12:.2f} TB in {of[0].save.tensors:,} tensors; {of[-1].ranks:,} ranks are {of[-1].mesh}"
        )
        found.append((f"{name}: {size}", _SAVE, [_save_row(cell) for cell in of]))
    most = max(cell.ranks for cell in cells)
    for cell in cells:
        if cell.ranks == most and cell.loads:
            found.append((f"restart of {cell.name}", _LOAD, [_load_row(cell, load) for load in cell.loads]))
    beside = [(cell, cell.dcp) for cell in cells if cell.dcp is not None]
    if beside:
        title = f"beside the planner of torch DCP, {beside[0][0].name}"
        found.append((title, _DCP, [_dcp_row(cell, dcp) for cell, dcp in beside]))
    return found


def show(cells: Sequence[Cell], bars: list[Bar], facts: dict[str, object]) -> None:
    """Print everything."""
    console = tell_facts(facts, width=146)
    for title, columns, rows in tables(cells):
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    show_bars(console, bars)


_PAGE_SAVE = (
    "state", "ranks", "plan of a rank, first save, ms", "later, ms", "memory, MiB", "first rank, ms", "manifest, KiB",
    "decode, ms", "bytes written, most / mean",
)  # fmt: skip
_PAGE_LOAD = ("state", "saved by", "loaded by", "plan of a rank, ms", "files", "requests", "bytes read / needed")


def as_markdown(cells: Sequence[Cell], facts: dict[str, object]) -> str:
    """For docs/scale.md: of each state the fewest and the most ranks, and restarts on an eighth of them."""
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    ends = [cell for of in by_name.values() for cell in (of if len(of) == 1 else (of[0], of[-1]))]
    largest = [of[-1] for of in by_name.values()]
    meshes = [f"- {c.name}: {c.nbytes / 1e12:.2f} TB in {c.save.tensors:,} tensors; {c.mesh}" for c in largest]
    most = max(cell.ranks for cell in cells)
    loads = [(c, x) for c in cells if c.ranks == most for x in c.loads if x.ranks == most // 8]
    text = [f"{facts['machine']}, torch {facts['torch']}. CPU seconds of one core.", "", *meshes, ""]
    text += [*_table("Save", _PAGE_SAVE, [_page_save(cell) for cell in ends]), ""]
    text += [*_table("Restart", _PAGE_LOAD, [_page_load(cell, load) for cell, load in loads]), ""]
    beside = [(cell, cell.dcp) for cell in cells if cell.dcp is not None]
    if beside:
        columns = [column.replace("\n", " ") for column in _DCP]
        rows = [_dcp_row(cell, dcp) for cell, dcp in beside]
        text += [*_table(f"Beside the planner of torch DCP, {beside[0][0].name}", columns, rows), ""]
    return "\n".join([*text, ""])


def _page_save(cell: Cell) -> list[str]:
    ranks, _, first, memory, later, _, _, rank_0, manifest, _, decode, balance = _save_row(cell)
    return [cell.name, ranks, first, later, memory, rank_0, manifest, decode, balance]


def _page_load(cell: Cell, load: LoadCost) -> list[str]:
    before, after, plan, files, requests, _, read = _load_row(cell, load)
    return [cell.name, before, after, plan, files, requests, read]


def _table(title: str, columns: Sequence[str], rows: Sequence[list[str]]) -> list[str]:
    return [f"**{title}**", "", _line(columns), "|---|" + "---:|" * (len(columns) - 1), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|"  # without blanks: the pages are counted in words, and a lone bar is none
