"""Draws docs/background.svg: one save in the background beside two steps of training, from measured moments.

    .venv/bin/python docs/timeline.py

Trains a small stack of layers in this process, saves it, notes when everything happens, and writes the picture as
plain SVG. Every bar is measured in the run that draws it; where holdfast does not tell a moment, a function is wrapped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.write.worker import ProcessWorker

WIDTH, LAYERS, BATCH = 2560, 4, 256
THREADS = 1  # that train; a machine with accelerators has cores to spare for copying, and so has this run
PICTURE = Path(__file__).with_name("background.svg")

LEFT, RIGHT, ROW, BAR = 118, 20, 46, 26  # of the picture, in pixels
ACROSS = 960
COLORS = {
    "forward": "#4c78a8", "backward": "#376092", "step": "#7b5ea7", "wait": "#c44e52", "save": "#d9822b",
    "copy": "#d9822b", "write": "#3f8f5f", "sync": "#2b6b45", "commit": "#8a6d3b",
}  # fmt: skip
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.in { fill: #ffffff; text-anchor: middle }
.lane { text-anchor: end; font-weight: 600 }
.line { stroke: #57606a; stroke-dasharray: 3 3 }
.tick { stroke: #ffffff; stroke-opacity: 0.7 }
.axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .line { stroke: #9da7b1 } }
"""


@dataclass
class Moments:
    """What was measured: bars (lane, kind, from, to), the moments at which a window was written, and milestones."""

    bars: list[tuple[str, str, float, float]] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    copying: float = 0.0
    milestones: list[tuple[float, str]] = field(default_factory=list)

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = work()
        self.bars.append(("training", kind, began, time.monotonic()))
        return result


def watch_windows(moments: Moments) -> None:
    """Note when a window of memory is handed to the writer, and when the writer is done with it."""
    write = ProcessWorker.write

    def noting(self: ProcessWorker, *args: int) -> Future[None]:
        moments.handed.append(time.monotonic())
        future = write(self, *args)
        future.add_done_callback(lambda _: moments.written.append(time.monotonic()))
        return future

    ProcessWorker.write = noting  # type: ignore[method-assign]


def measure(folder: Path) -> tuple[Moments, holdfast.Saving]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    moments = Moments()

    def train() -> None:
        loss = moments.timed("forward", lambda: model(torch.randn(BATCH, WIDTH)).square().mean())
        moments.timed("backward", loss.backward)
        moments.timed("step", optimizer.step)
        optimizer.zero_grad()

    def heard(event: holdfast.Event) -> None:
        if event.kind == "start":
            moments.copying = time.monotonic()

    with holdfast.Saver() as saver, holdfast.listen(heard):
        train()
        saver.prepare(state)
        saver.save(state, folder / "warm-up").wait()
        moments.bars.clear()
        watch_windows(moments)

        train()
        called = time.monotonic()
        saving = moments.timed("save", lambda: saver.save(state, folder / "shown"))
        returned = time.monotonic()
        train()
        while not saving.done:
            train()
    took = saving.timing
    waited = took.stall - (returned - called)
    copied, durable = called + took.staging, called + took.staging + took.writing
    if waited > 0.001:  # the first step after the call began with this
        lane, kind, began, ended = next(bar for bar in moments.bars if bar[1] == "step" and bar[2] > returned)
        moments.bars.remove((lane, kind, began, ended))
        moments.bars += [(lane, "wait", began, began + waited), (lane, kind, began + waited, ended)]
    moments.bars += [
        ("copying thread", "copy", moments.copying, copied),
        ("writer process", "write", moments.handed[0], moments.written[-1]),
        ("writer process", "sync", moments.written[-1], durable),
        ("commit", "commit", durable, called + took.total),
    ]
    moments.milestones = [
        (called, f"save() is called, and returns after {(returned - called) * 1e3:.1f} ms"),
        (copied, f"all is copied: {took.bytes / 1e6:.0f} MB after {took.staging * 1e3:.0f} ms"),
        (durable, f"all is durable after {(durable - called) * 1e3:.0f} ms"),
        (called + took.total, f"committed after {took.total * 1e3:.0f} ms"),
    ]
    return moments, saving


def draw(moments: Moments) -> str:
    lanes = list(dict.fromkeys(lane for lane, *_ in moments.bars))
    called, committed = moments.milestones[0][0], moments.milestones[-1][0]
    end = max(committed, min(ended for _, kind, _, ended in moments.bars if kind == "step" and ended > called + 0.01))
    end, start = end + 0.02 * (end - called), called - 0.3 * (end - called)
    top = 20 * len(moments.milestones) + 14
    bottom = top + ROW * len(lanes)

    def x(at: float) -> float:
        return LEFT + (min(max(at, start), end) - start) / (end - start) * (ACROSS - LEFT - RIGHT)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS} {bottom + 62}" role="img">',
        "<title>One save in the background, beside training</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, (at, text) in enumerate(moments.milestones):
        y = 20 * number + 14
        out.append(f'<line class="line" x1="{x(at):.1f}" y1="{y + 4}" x2="{x(at):.1f}" y2="{bottom}"/>')
        right = x(at) > ACROSS * 0.75
        anchor = f'x="{x(at) - 6:.1f}" text-anchor="end"' if right else f'x="{x(at) + 6:.1f}"'
        out.append(f'<text {anchor} y="{y + 2}">{text}</text>')
    for lane in lanes:
        y = top + ROW * lanes.index(lane)
        out.append(f'<text class="lane" x="{LEFT - 10}" y="{y + BAR / 2 + 4}">{lane}</text>')
        for _, kind, began, ended in (b for b in moments.bars if b[0] == lane and b[2] < end and b[3] > start):
            left, width = x(began), max(x(ended) - x(began), 1.5)
            out.append(
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{COLORS[kind]}"/>'
            )
            if width > 7 * len(kind) + 6:
                out.append(f'<text class="in" x="{left + width / 2:.1f}" y="{y + BAR / 2 + 4}">{kind}</text>')
        for at in moments.written if lane == "writer process" else ():
            out.append(f'<line class="tick" x1="{x(at):.1f}" y1="{y + BAR - 6}" x2="{x(at):.1f}" y2="{y + BAR}"/>')
    axis = bottom - 6
    out.append(f'<line class="axis" x1="{LEFT}" y1="{axis}" x2="{ACROSS - RIGHT}" y2="{axis}"/>')
    every = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (end - called) / s <= 10)
    for number in range(int((end - called) / every) + 1):
        at = x(called + number * every)
        out.append(f'<line class="axis" x1="{at:.1f}" y1="{axis}" x2="{at:.1f}" y2="{axis + 5}"/>')
        out.append(f'<text x="{at:.1f}" y="{axis + 19}" text-anchor="middle">{number * every * 1e3:.0f} ms</text>')
    at = LEFT
    for kind in dict.fromkeys(kind for _, kind, *_ in moments.bars):
        text = {"wait": "step waits for copies", "sync": "fsync, part", "save": "call of save()"}.get(kind, kind)
        out.append(f'<rect x="{at}" y="{axis + 38}" width="11" height="11" rx="2" fill="{COLORS[kind]}"/>')
        out.append(f'<text x="{at + 16}" y="{axis + 48}">{text}</text>')
        at += 34 + 6.6 * len(text)
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="timeline-", dir=".") as folder:
        moments, saving = measure(Path(folder))
    PICTURE.write_text(draw(moments))
    sys.stdout.write(f"{saving.timing}\n{PICTURE}\n")


if __name__ == "__main__":
    main()
