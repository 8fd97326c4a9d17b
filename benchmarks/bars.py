"""The bars that holdfast must clear, each with its figure of this run.

Called by the bench once all is measured.
Never passes a bar whose figure is missing.
"""

from __future__ import annotations

from benchmarks.bar import Bar
from benchmarks.rows import RAW, RAW_HUGE, Row, Rows
from benchmarks.systems import READ, SUMMED, System

SAVE = "durable save, 2 ranks"
COLD = "cold load, same 2 ranks"
WARM = "warm load, same 2 ranks"
SMALL_SAVE = "small tensors, durable save"
SMALL_LOAD = "small tensors, warm load"
MEMORY = 256 << 20


def resharding(saved: int, loaded: int) -> str:
    """The name of this work."""
    return f"saved by {saved}, loaded by {loaded}"


def judge(rows: Rows, reshardings: list[tuple[int, int]]) -> list[Bar]:
    """Every bar."""

    def fair(work: str, over: str, under: str) -> tuple[float | None, float | None]:
        return rows.ratio(work, over, under), rows.ratio(work, over, under, best=True)

    def faster(what: str, work: str, than: str, least: float) -> Bar:
        return Bar(what, *fair(work, than, "holdfast"), least=least)

    def beside_safetensors(what: str, work: str, system: str, most: float, floor: System) -> Bar:
        least = rows.ratio(work, floor.name, "safetensors")
        return Bar(f"{what}, its time over safetensors'", *fair(work, system, "safetensors"), most=most, floor=least)

    bars = [
        faster("save, as many times as fast as DCP", SAVE, "torch DCP", 2.0),
        faster("save, share of the raw write rate", SAVE, RAW, 0.75),
        Bar("save, CPU seconds over those of the thriftiest peer", _cpu_share(rows), most=1.0),
        faster("cold load, share of the raw read rate", COLD, RAW, 0.85),
        faster("cold load, as many times as fast as DCP", COLD, "torch DCP", 1.0),
        Bar(
            "cold load of DCP's own checkpoint, as many times as fast as DCP",
            *fair(COLD, "torch DCP", "DCP's, by holdfast"),
            least=1.0,
        ),
        beside_safetensors("warm load", WARM, "holdfast", 1.15, SUMMED),
        beside_safetensors("warm load with verify=False", WARM, "holdfast, unchecked", 1.0, READ),
    ]
    for saved, loaded in reshardings:
        row = rows.find(resharding(saved, loaded), "holdfast")
        read = max([*row.read_ratio, *row.told_ratio, *row.device_ratio], default=None) if row else None
        bars.append(Bar(f"{resharding(saved, loaded)}: bytes read over needed, by the worst count", read, most=1.05))
    small = rows.find(SMALL_SAVE, "holdfast")
    disk = small.disk / small.nbytes if small and small.disk else None
    return [
        *bars,
        faster("small tensors, save as many times as fast as DCP", SMALL_SAVE, "torch DCP", 8.0),
        faster("small tensors, load as many times as fast as DCP", SMALL_LOAD, "torch DCP", 10.0),
        beside_safetensors("small tensors, load with verify=False", SMALL_LOAD, "holdfast, unchecked", 1.0, READ),
        Bar("small tensors, bytes of disk over bytes of tensors", disk, most=1.1),
        Bar("extra host memory on the worst rank, any work", _memory(rows), most=MEMORY / 2**20, unit=" MiB"),
    ]


def _cpu_share(rows: Rows) -> float | None:
    own, peers = None, []
    for row in rows.works().get(SAVE, []):
        if row.cpu_per_gb is not None and row.system not in (RAW, RAW_HUGE):
            if row.system == "holdfast":
                own = row.cpu_per_gb
            else:
                peers.append(row.cpu_per_gb)
    return own / min(peers) if own is not None and peers else None


def _memory(rows: Rows) -> float | None:
    found: list[Row] = [row for of in rows.works().values() for row in of if row.system == "holdfast"]
    return max((bytes_ for row in found for bytes_ in row.memory), default=0) / 2**20 if found else None
