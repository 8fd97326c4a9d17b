"""Draws the pictures of docs/concepts.md: `python docs/pictures/draw.py`. Plain boxes and arrows, light and dark.

A test looks that the pictures are what this draws. Needs the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
STYLE = """<style>
.page { fill: #ffffff; stroke: #d0d7de } text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.small { font-size: 11.5px; fill: #57606a } .left { text-anchor: start } .right { text-anchor: end }
.strong { font-weight: 600 }
.state { fill: #ddf4ff; stroke: #4c78a8 } .file { fill: #dafbe1; stroke: #3f8f5f }
.commit { fill: #fff1d6; stroke: #b9770e }
.dead { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 } .line { stroke: #57606a; fill: none }
.tip { fill: #57606a } .cut { stroke: #8c959f; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .small { fill: #9da7b1 }
.state { fill: #12304a } .file { fill: #12371f } .commit { fill: #43300a }
.line { stroke: #9da7b1 } .tip { fill: #9da7b1 }
}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>
"""


def picture(title: str, width: int, height: int, *parts: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
    return head + STYLE + page + "\n".join(parts) + "\n</svg>\n"


def box(kind: str, x: float, y: float, width: float, height: float, *lines: str) -> str:
    middle = y + height / 2 + 4.5 - 8.5 * (len(lines) - 1)
    told = [
        f'<text class="{"strong" if n == 0 else "small"}" x="{x + width / 2}" y="{middle + 17 * n}">{line}</text>'
        for n, line in enumerate(lines)
    ]
    return "\n".join([f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>', *told])


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" d="M{x1} {y1} {x2} {y2}" marker-end="url(#tip)"/>'


def said(x: float, y: float, text: str, kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def travels() -> str:
    """A tensor that four ranks hold, to files, and to two ranks."""
    parts = [said(24, 28, "saved on 4 ranks: FSDP2, each a quarter of the rows", "left")]
    for rank in range(4):
        y = 44 + 46 * rank
        parts += [
            box("state", 24, y, 150, 36, f"rank {rank}: rows {rank * 256}…"),
            arrow(176, y + 18, 296, y + 18),
            box("file", 300, y, 250, 36, f"model/0000{rank}-of-00004…"),
        ]
    parts += [
        box("commit", 300, 236, 250, 36, "manifest.json: who has what"),
        said(820, 28, "loaded on 2 ranks: the columns", "right"),
    ]
    for rank in range(2):
        y = 66 + 92 * rank
        parts.append(box("state", 670, y, 150, 48, f"rank {rank}: columns", "its part of each file"))
        parts += [arrow(552, 62 + 46 * other, 668, y + 12 + 8 * other) for other in range(4)]
    return picture("What travels: boxes of tensors, to files, and from files to other boxes", 844, 292, *parts)


def commit() -> str:
    """The rounds of a save, and what is left by a kill in each."""
    stages = [
        ("state", "plan", "who writes which box"),
        ("state", "write", "data files, under new names"),
        ("file", "durable", "each rank: synced, reported"),
        ("commit", "commit", "manifest.json, in one step"),
        ("file", "saved", "all ranks hear, one verdict"),
    ]
    parts = []
    for n, (kind, name, what) in enumerate(stages):
        x = 20 + 166 * n
        parts.append(box(kind, x, 40, 146, 52, name, what.partition(",")[0] + ("," if "," in what else "")))
        if "," in what:
            parts.append(said(x + 73, 108, what.partition(", ")[2]))
        if n:
            parts.append(arrow(x - 19, 66, x - 2, 66))
    parts += [
        '<path class="cut" d="M591 118V196"/>',
        said(300, 148, "killed here: the step before is the newest; what was written is swept", ""),
        said(300, 168, "if all ranks were durable, the next start commits it late"),
        said(718, 148, "killed here:", ""),
        said(718, 168, "this step is the newest"),
        box("dead", 20, 126, 556, 60),
        box("dead", 606, 126, 224, 60),
    ]
    return picture("The commit: a folder is a checkpoint if and only if it holds manifest.json", 850, 212, *parts)


def overlap() -> str:
    """Training, copying and writing beside each other."""
    parts = [
        said(20, 62, "training", "left strong"),
        box("state", 130, 40, 150, 36, "step 500"),
        box("commit", 280, 40, 22, 36),
        box("state", 302, 40, 190, 36, "forward"),
        box("state", 492, 40, 210, 36, "backward"),
        box("state", 702, 40, 126, 36, "step 501"),
        said(20, 122, "copy", "left strong"),
        box("file", 302, 100, 150, 36, "device → host"),
        said(20, 182, "write", "left strong"),
        box("file", 340, 160, 300, 36, "host → disk or store"),
        box("commit", 640, 160, 70, 36, "commit"),
        '<path class="cut" d="M452 136V214"/>',
        said(452, 230, "staged: from here it outlives its trainer"),
        said(291, 28, "save() returns"),
        '<path class="line" d="M454 118H700V80" marker-end="url(#tip)"/>',
        said(578, 112, "optimizer.step() waits for this, if it is early"),
    ]
    return picture(
        "A save in the background: copied beside forward and backward, written by another process", 850, 246, *parts
    )


PICTURES = {"travels.svg": travels, "commit.svg": commit, "overlap.svg": overlap}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
