"""Draws docs/pictures/trace.svg: a timeline as `holdfast view` joins it, in the lanes in which Perfetto draws it.

    .venv/bin/python docs/pictures/trace.py

Starts four ranks that save beside training, and draws one of their saves. Every bar is what a rank wrote down.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast.report.timeline import merge

PICTURE = Path(__file__).with_name("trace.svg")
RANKS, STEP = 4, 2
LEFT, WIDTH, ROW, GAP = 168, 1000, 15, 8  # in pixels
LANES = ("training", "save", "writer process", "writer process 2", "writer process 3")
COLOURS = {
    "call": "#8e6bbf", "gather": "#8e6bbf", "hook wait": "#d1495b", "plan": "#c9a227", "layout": "#c9a227",
    "stage": "#2a7fb8", "write": "#3b9c6d", "write file": "#3b9c6d", "durable": "#1f6f4a", "sync file": "#1f6f4a",
    "small files": "#1f6f4a", "settle": "#9aa5b1", "commit": "#e0701a",
}  # fmt: skip

SCRIPT = f"""
import sys, torch, torch.distributed as dist, holdfast
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(2500, 2500) for _ in range(3)]))
optimizer = torch.optim.AdamW(model.parameters())
state = {{"model": model, "optimizer": optimizer}}
def forward_and_backward():
    optimizer.zero_grad()
    model(torch.randn(1, 2500)).sum().backward()
forward_and_backward()
optimizer.step()
with holdfast.timeline(sys.argv[1] + "/timeline"), holdfast.Saver() as saver:
    saver.prepare(state)
    for step in range(1, {STEP} + 1):
        forward_and_backward()
        dist.barrier()
        saving = saver.save(state, f"{{sys.argv[1]}}/step-{{step}}", step=step)
        optimizer.step()
        saving.wait()
"""


def main() -> None:
    """Run it, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*launch, str(script), folder], check=True)
        events = merge(Path(folder) / "timeline").events
    PICTURE.write_text(_svg(events))


def _svg(events: list[dict[str, Any]]) -> str:
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and f"/step-{STEP}" in e["args"]["path"]]
    whole = [e for e in spans if e["name"] == "background save"]
    begin, end = min(e["ts"] for e in whole), max(e["ts"] + e["dur"] for e in whole)
    scale = WIDTH / (end - begin)
    parts, y = [], 28.0
    for tick in range(0, int((end - begin) / 1e5) + 1):
        x = LEFT + tick * 1e5 * scale
        parts.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="100%" stroke="#e3e7ec"/>')
        parts.append(f'<text x="{x + 3:.1f}" y="14" fill="#667">{tick / 10:.1f} s</text>')
    for pid in range(1, RANKS + 1):
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">rank {pid - 1}</text>')
        for lane in LANES:
            mine = [e for e in spans if e["pid"] == pid and lanes[pid, e["tid"]] == lane and e["name"] in COLOURS]
            parts.append(f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end" fill="#445">{lane}</text>')
            for e in sorted(mine, key=lambda e: -e["dur"]):
                parts.append(_bar(e, LEFT + (e["ts"] - begin) * scale, y, max(e["dur"] * scale, 1.0)))
            y += ROW
        y += GAP
    height = y + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _bar(event: dict[str, Any], x: float, y: float, width: float) -> str:
    told = f"{event['name']}: {event['dur'] / 1e3:.1f} ms"
    label = ""
    if width > 7 * len(event["name"]) + 6:
        label = f'<text x="{x + 4:.1f}" y="{y + 10.5:.1f}" fill="#fff">{html.escape(event["name"])}</text>'
    return (
        f'<g><title>{html.escape(told)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}" '
        f'rx="2" fill="{COLOURS[event["name"]]}"/>{label}</g>'
    )


if __name__ == "__main__":
    main()
