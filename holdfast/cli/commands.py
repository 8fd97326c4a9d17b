"""Every command: its arguments, its options and its help. `app` registers them.

Help and TAB need this file alone, so it imports neither torch nor the rest of the package. What a command does is in
a module of this room that `_run` imports when the command is called.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import typer


def _run(function: str, arguments: dict[str, Any]) -> None:
    """Call ``module.function`` of this room, which is imported now, with the arguments of the command."""
    module, _, name = function.partition(".")
    getattr(import_module(f"holdfast.cli.{module}"), name)(**arguments)


def _argument(help: str, default: Any = ...) -> Any:
    """An argument of a command: the default of a parameter. It is required without a ``default``."""
    return typer.Argument(default, help=help, show_default=False)


def _option(default: Any, name: str, help: str, *, panel: str | None = None, **more: Any) -> Any:
    """An option of a command. ``name``: several with a comma between. ``panel``: the heading it has in the help."""
    return typer.Option(default, *name.split(","), help=help, rich_help_panel=panel, **more)


_Many = list[str] | None
_SOURCE = "A checkpoint of any format: a path or a URL."
_TENSORS = "Only tensors whose names match."
_JSON = _option(False, "--json", "Print one JSON object instead of a table.")
_OVERWRITE = _option(False, "--overwrite", "Replace the checkpoint at the target.")
_REMAP = "Under a map: a JSON file or transformers:FOLDER; with :inverse behind, the way back."
_MESH, _BENCH, _MERGE = "What a load would read", "With --bench", "With --merge"


class Format(str, Enum):
    """What can be written."""

    holdfast = "holdfast"
    torch = "torch"
    dcp = "dcp"
    huggingface = "huggingface"
    hf = "hf"


class Check(str, Enum):
    """How much of the source is checked while it is read."""

    yes = "yes"
    blocks = "blocks"
    no = "no"


def ls(
    root: str = _argument("A run, a folder of runs, or one checkpoint: a path or a URL."),
    sizes: bool = _option(False, "--sizes", "Show what steps share, and what deleting each would free."),
    fast: str | None = _option(None, "--fast", "List the fast tier of the same run too.", metavar="FOLDER"),
    headers: bool = _option(False, "--headers", "Check the header of every data file too."),
    json: bool = _JSON,
) -> None:
    """List the checkpoints of a run (step, age, size, health, metric), or the runs of a folder."""
    _run("ls.ls", locals())


def show(
    path: str = _argument(_SOURCE),
    tensors: str | None = _option(None, "--tensors", f"{_TENSORS} Lists them.", metavar="GLOB"),
    depth: int | None = _option(None, "--depth", "How many levels of modules to show.", min=1),
    stats: bool = _option(False, "--stats", "Read the tensors: min, max, mean, NaN. Lists them."),
    layout: bool = _option(False, "--layout", "List each piece of the tensors with its file."),
    values: bool = _option(False, "--values", "Show all values, and those that differ by rank."),
    sizes: bool = _option(False, "--sizes", "Show bytes by section, dtype and module."),
    remap: str | None = _option(None, "--remap", _REMAP, metavar="MAP"),
    mesh: str | None = _option(None, "--mesh", 'Axes of the mesh: "replicate=2,fsdp=16,tp=2".', panel=_MESH),
    ranks: int | None = _option(None, "--ranks", "Ranks of the mesh: FSDP over all of them.", min=1, panel=_MESH),
    shard: _Many = _option(None, "--shard", "The axis that tp cuts. Repeatable.", metavar="GLOB=DIM", panel=_MESH),
    node_size: int = _option(8, "--node-size", "Ranks on each node.", min=1, panel=_MESH),
    alone: bool = _option(False, "--no-share", "Each rank reads for itself.", panel=_MESH),
    json: bool = _JSON,
) -> None:
    """Show what a checkpoint holds: modules, tensors, shapes, dtypes, bytes, values, attached files.

    With --mesh: what each rank and node of that mesh would read to load it, in how many requests, and how evenly.
    """
    _run("show.show", locals())


def diff(
    a: str = _argument(_SOURCE),
    b: str = _argument("Another checkpoint, of any format."),
    tensors: str = _option("*", "--tensors", _TENSORS, metavar="GLOB"),
    names_only: bool = _option(False, "--names-only", "Compare names, shapes and dtypes; read no tensor."),
    top: int = _option(50, "--top", "Tensors to show, largest change first, and as many values; 0: all.", min=0),
    remap: str | None = _option(None, "--remap", f"The first one. {_REMAP}", metavar="MAP"),
    json: bool = _JSON,
) -> None:
    """Compare names, shapes, dtypes and values; the exit code is 0 if all are the same, 1 if any differ.

    relative: the norm of the difference, divided by the larger norm; largest, mean: of the absolute differences;

    cosine: of the angle between the two tensors; norm first, norm second: of each of them.

    Tensors whose recorded checksums are equal are not read, and the last line says so; `holdfast verify` reads them.
    """
    _run("diff.diff", locals())


def view(
    path: str = _argument("A checkpoint of any format, a run, or a folder of timelines: a path or a URL."),
    out: str | None = _option(None, "--output,-o", "NAME.html by default; - is standard output.", metavar="FILE"),
    serve: bool = _option(False, "--serve", "Serve the page to this machine, with statistics on demand."),
    port: int = _option(0, "--port", "Of the server; 0 is any free one.", min=0, max=65535),
    stats: _Many = _option(None, "--stats", "Read these tensors and show statistics. Repeatable.", metavar="GLOB"),
    timeline: Path | None = _option(None, "--timeline", "Show a timeline of its saves too.", metavar="FOLDER"),
    require: _Many = _option(None, "--require", "A public key that must have signed it. Repeatable.", metavar="FILE"),
    check: bool | None = _option(None, "--check/--no-check", "Check headers and sizes. (default: if files are few)"),
    against: str | None = _option(None, "--against", "Compare with another checkpoint.", metavar="PATH"),
    browser: bool = _option(False, "--open", "Open the page in a browser."),
    json: bool = _JSON,
) -> None:
    """Make an HTML page of a checkpoint, of a run, or of two checkpoints; of a folder of timelines, one trace.

    The page is one file and needs no network. The trace is FOLDER/trace.json, for https://ui.perfetto.dev.
    """
    _run("view.view", locals())


def watch(
    root: str = _argument("A run: a path or a URL."),
    once: bool = _option(False, "--once", "Look once, and end."),
    every: float = _option(2.0, "--every", "Seconds between two looks.", min=0.1),
    json: bool = _option(False, "--json", "Print one JSON object a look, each on a line of its own."),
) -> None:
    """Watch a running job: its last save and its next, how long training waits, rates, failures, uploads to come."""
    _run("watch.watch", locals())


def verify(
    path: str = _argument("A checkpoint of any format, or a run: a path or a URL."),
    shallow: bool = _option(False, "--shallow", "Check headers, sizes and attached files only."),
    json: bool = _JSON,
) -> None:
    """Check every byte of a checkpoint, or of each step of a run; the exit code is 1 if any byte is damaged."""
    _run("mend.verify", locals())


def doctor(
    path: str | None = _argument("A folder, a place in a store, or a checkpoint: a path or a URL.", None),
    read_only: bool = _option(False, "--read-only", "Do not try to write there."),
    bench: bool = _option(False, "--bench", "Measure the disk or store instead, and say how often to save."),
    size: str = _option("1GB", "--size", "Bytes to write and read.", panel=_BENCH),
    state: str | None = _option(None, "--state-size", "Bytes that one rank saves.", metavar="SIZE", panel=_BENCH),
    mtbf: str = _option("24h", "--mtbf", "Between failures of the job: 30m, 8h.", metavar="TIME", panel=_BENCH),
    step: str | None = _option(None, "--step-time", "Of one training step.", metavar="TIME", panel=_BENCH),
    json: bool = _JSON,
) -> None:
    """Find what is wrong, and say how to repair it; the exit code is that of the first thing that failed.

    With --bench: measure the disk or store at PATH, bare and through holdfast. It deletes what it writes.
    """
    _run("doctor.doctor", locals())


def repair(
    path: str = _argument("A checkpoint of holdfast: a path or a URL."),
    source: _Many = _option(None, "--from", "A copy, or a folder of checkpoints. Repeatable.", metavar="SOURCE"),
    dry_run: bool = _option(False, "--dry-run", "Write nothing; say what could be repaired."),
    json: bool = _JSON,
) -> None:
    """Repair what is damaged, from the checkpoint itself and from copies; the exit code is 1 if damage is left."""
    _run("mend.repair", locals())


def rescue(
    folder: str = _argument("A folder with data files of holdfast: a path or a URL."),
    like: str | None = _option(None, "--like", "A copy, or a step of the same run with the values.", metavar="STEP"),
    save: str | None = _option(None, "--save", "The save to take, if there are files of several.", metavar="ID"),
    step: int | None = _option(None, "--step", "The step to write into the manifest."),
    json: bool = _JSON,
) -> None:
    """Make a lost manifest again from the data files; the exit code is 1 if bytes are damaged."""
    _run("mend.rescue", locals())


def convert(
    source: str = _argument(_SOURCE),
    target: str = _argument("Where to write: a path or a URL."),
    more: _Many = _argument("With --merge: further sources, and the target as the last of all paths.", None),
    to: Format | None = _option(None, "--to", "The format. (default: by the suffix of the target, else holdfast)"),
    model_only: bool = _option(False, "--model-only/--all", "The model, under its own names.", show_default=False),
    only: _Many = _option(None, "--only", "Names or patterns, as show lists them. Repeatable.", metavar="PATTERN"),
    rename: _Many = _option(None, "--rename", "A name or a leading path. Repeatable.", metavar="OLD=NEW"),
    remap: str | None = _option(None, "--remap", _REMAP, metavar="MAP"),
    like: str | None = _option(None, "--like", "Names, shapes and small files of this model.", metavar="FOLDER"),
    dtype: str | None = _option(None, "--dtype", "The dtype of floating tensors in the target: bfloat16, …"),
    step: int | None = _option(None, "--step", "The step to write down, in holdfast's format."),
    shard: str = _option("5GB", "--max-shard-size", "Most bytes of tensors in one file.", metavar="SIZE"),
    extras: _Many = _option(None, "--extras", "config.json, tokenizer, or their folder. Repeatable.", metavar="PATH"),
    overwrite: bool = _OVERWRITE,
    verify: Check = _option(Check.yes, "--verify", "Check what is read: blocks also checks those read in part."),
    merge: bool = _option(False, "--merge", "Write the mean of all sources, or a weighted sum.", panel=_MERGE),
    weights: str | None = _option(
        None, "--weights", "One for each source, with commas: 0.5,0.3,0.2.", metavar="W,W,…", panel=_MERGE
    ),
    decay: float | None = _option(
        None, "--decay", "A moving average, oldest source first.", min=0, max=1, panel=_MERGE
    ),
    base: str | None = _option(
        None, "--base", "Add weighted differences from this one to it.", metavar="PATH", panel=_MERGE
    ),
    slerp: float | None = _option(
        None, "--slerp", "Spherical: 0 is the first of two, 1 the second.", min=0, max=1, panel=_MERGE
    ),
    json: bool = _JSON,
) -> None:
    """Write a checkpoint in another format; the same command continues a conversion that was interrupted.

    For transformers: holdfast convert SOURCE TARGET --to huggingface --extras FOLDER_WITH_CONFIG_AND_TOKENIZER

    From a checkpoint of the same model: holdfast convert SOURCE TARGET --like MODEL_FOLDER

    For torch.load and load_state_dict: holdfast convert SOURCE model.pt --model-only

    To merge checkpoints of one model: holdfast convert --merge A B C TARGET --weights 0.5,0.3,0.2

    With --model-only, --only names another section than the model, and the format is huggingface if no other is named.
    """
    _run("convert.convert", locals())


def copy(
    source: str = _argument("A checkpoint of holdfast, or a run: a path or a URL."),
    target: str = _argument("Where to write: a path or a URL."),
    overwrite: bool = _OVERWRITE,
    bandwidth: str | None = _option(None, "--bandwidth", "Most bytes a second: 200MB.", metavar="SIZE"),
    json: bool = _JSON,
) -> None:
    """Copy a checkpoint or all steps of a run; the same command continues a copy that was interrupted."""
    _run("copy.copy", locals())


def prune(
    root: str = _argument("A run: a path or a URL. With --orphans also one step."),
    last: int | None = _option(None, "--keep-last", "Keep the newest N. (default: 2)", metavar="N", min=1),
    every: int | None = _option(None, "--keep-every", "Keep every multiple of K.", metavar="K", min=1),
    best: int | None = _option(None, "--keep-best", "Keep the N with the best metric.", metavar="N", min=0),
    highest: bool = _option(False, "--highest", "The best metric is the highest."),
    optimizer_last: int | None = _option(
        None, "--optimizer-last", "The newest N keep their optimizer.", metavar="N", min=1
    ),
    model_every: int | None = _option(None, "--model-every", "Keep models of multiples of K.", metavar="K", min=1),
    optimizer: _Many = _option(None, "--optimizer", "What optimizers are called (default: optim*).", metavar="SECTION"),
    name: str | None = _option(None, "--name", "What the steps are called, as in step-{step}.", metavar="NAME"),
    orphans: bool = _option(False, "--orphans", "Delete what dead saves, copies and conversions left, and no step."),
    yes: bool = _option(False, "--yes", "Delete. Without it nothing is changed."),
    json: bool = _JSON,
) -> None:
    """Delete the steps of a run that no rule keeps, or with --orphans what dead saves left; a dry run without --yes.

    The newest whole step always stays, and so do files that other steps reuse or that a running save may need.
    """
    _run("prune.prune", locals())
