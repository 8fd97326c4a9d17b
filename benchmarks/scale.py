"""Plans, manifests and restarts of 64 to 16,384 ranks, simulated: what they cost and how that grows.

    python -m benchmarks.scale [--quick] [--ranks 64,512,4096,16384] [--write-docs]

Everything but the bytes of tensors is real: layouts as `collect` would find them, the planner, the messages, the
manifest, the headers of data files, the ranges a restart reads. Beside it torch's own planner, on as many ranks as
time allows. Costs are CPU seconds of this process, memory is measured in a pass of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import scale_dcp, scale_picture, scale_report, scale_states
from benchmarks.frame import machine, options_of, say, write
from benchmarks.scale_load import load
from benchmarks.scale_report import Cell
from benchmarks.scale_save import save
from benchmarks.scale_states import LLAMA, MIXTURE, Model, Sharding, World

RANKS, QUICK = (64, 512, 4096, 16384), (64, 512)
DCP_RANKS, DCP_QUICK = (64, 256), (16,)
WORLDS: list[tuple[Model, Callable[[int], Sharding]]] = [
    (LLAMA, scale_states.fsdp),
    (LLAMA, scale_states.hsdp),
    (LLAMA, scale_states.three_d),
    (MIXTURE, scale_states.expert),
]
LOADED_BY = (1, 2, 4, 8)
"""A restart has as many ranks as the save, or one of so many."""

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- figures: python -m benchmarks.scale --write-docs -->", "<!-- end of figures -->"


def simulate(ranks: Sequence[int], dcp_ranks: Sequence[int]) -> list[Cell]:
    """All cells, told as they come."""
    cells: list[Cell] = []
    for model, sharding in WORLDS:
        for size in sorted({*ranks, *(dcp_ranks if (model, sharding) == WORLDS[0] else ())}):
            began = time.monotonic()
            world = World(model, sharding(size))
            saved = save(world)
            cell = Cell(model.name, world.sharding.name, size, model.nbytes, saved.cost, mesh=mesh_of(world.sharding))
            # A restart on few ranks moves terabytes a rank, and cuts each into ranges: only the largest save is loaded.
            for share in LOADED_BY if size == max(ranks) else ():
                fewer = World(model, sharding(size // share))
                cell.loads.append(load(saved, fewer, samples(size // share)))
            if size in dcp_ranks and (model, sharding) == WORLDS[0]:
                cell.dcp = scale_dcp.plan(world)
            cells.append(cell)
            say(f"{cell.name}, {size:,} ranks: {time.monotonic() - began:.1f} s")
    return cells


def samples(size: int) -> list[int]:
    """The ranks of a restart that are looked at: the ends, and one whose boxes begin in the middle of a mesh."""
    return sorted({0, size // 2 + 1, size - 1})


def mesh_of(sharding: Sharding) -> str:
    """In words."""
    axes = {
        "stages": sharding.stages, "replicas": sharding.replicas, "shards": sharding.shards // sharding.experts,
        "tensor parallel": sharding.tensor, "expert parallel": sharding.experts,
    }  # fmt: skip
    return " × ".join(f"{n:,} {name}" for name, n in axes.items() if n > 1)


def facts_of(seconds: float) -> dict[str, object]:
    """What one must know to read the figures."""
    return {
        "states": "parameters, exp_avg, exp_avg_sq and step of AdamW; Llama in float32, the mixture in bfloat16 with "
        "float32 moments",
        "plan of a rank": "describe its state, make the plan, list its pieces; data files: name and arrange those; "
        "first rank: what it does beside that, until the manifest is encoded",
        "in brackets": "the least that can be: what some rank holds alone, over the mean",
        **machine(),
        "seconds": round(seconds, 1),
    }


def write_docs(figures: str, picture: str) -> None:
    """Put the figures into docs/scale.md, and the picture beside it."""
    page = DOCS / "scale.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{figures}{END}{after}")
    (DOCS / "scale.svg").write_text(picture)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    return tuple(int(n) for n in text.split(",") if n)


def main() -> int:
    """The command."""
    small = "up to 512 ranks, torch's planner on 16: half a minute"
    parser = options_of("scale", __doc__, quick=small, writes=False)
    parser.add_argument("--ranks", type=numbers, help="of the simulated saves, powers of two from 64 on")
    parser.add_argument("--dcp", type=numbers, help="the ranks of torch's planner, which takes 0.3 s for each of them")
    parser.add_argument("--write-docs", action="store_true", help="put figures and picture into docs/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    ranks = options.ranks or (QUICK if options.quick else RANKS)
    dcp_ranks = options.dcp if options.dcp is not None else (DCP_QUICK if options.quick else DCP_RANKS)
    cells = simulate(ranks, dcp_ranks)
    bars, facts = scale_report.judge(cells), facts_of(time.monotonic() - began)
    scale_report.show(cells, bars, facts)
    write(options.out, facts, [cell.plain() for cell in cells], bars)
    picture = scale_picture.draw(cells)
    options.out.with_suffix(".svg").write_text(picture)
    if options.write_docs:
        write_docs(scale_report.as_markdown(cells, facts), picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
