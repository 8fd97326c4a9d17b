"""``holdfast view``: an HTML page, written as one file or served to the browser of this machine.

`app` calls it. It overwrites no file but pages of holdfast, and serves on loopback alone.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.options import Json
from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint
    from holdfast.view.traces import Timeline

_OURS = b'<meta name="generator" content="holdfast '


def view(
    path: Annotated[str, typer.Argument(help="A checkpoint of any format, or the root of a run: a path or a URL.")],
    out: Annotated[
        str | None, typer.Option("--output", "-o", help="The page; - for standard output, NAME.html by default.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it on loopback, statistics on demand.")] = False,
    port: Annotated[int, typer.Option("--port", help="Of the server; 0 is any free one.", min=0, max=65535)] = 0,
    stats: Annotated[
        list[str] | None, typer.Option("--stats", help="Read these tensors and show statistics: a name or a glob.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="What holdfast.timeline wrote of saves.")] = None,
    require: Annotated[
        list[str] | None, typer.Option("--require", help="A public key that must have signed it, as a file.")
    ] = None,
    check: Annotated[
        bool | None, typer.Option("--check/--no-check", help="Look at headers and sizes. [default: if they are few]")
    ] = None,
    against: Annotated[str | None, typer.Option("--against", help="Another one: how far the two are apart.")] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Make a page of a checkpoint, of a run, or of what is between two checkpoints; it needs no network to be shown."""
    if serve and (out or stats):
        raise ValueError(
            "--serve computes statistics as they are asked for and writes no file: leave out -o and --stats"
        )
    trusted = [Path(key) for key in require] if require else None
    of_run = against is None and is_root(path)
    if (of_run or against is not None) and (serve or stats or timeline or check is not None or (of_run and trusted)):
        raise ValueError(
            "--serve, --stats, --timeline and --check are for the page of one checkpoint"
            + (f", and so is --require; {path} is a run" if of_run else ": leave out --against")
        )
    if of_run:
        from holdfast.view.run import run_page

        text = run_page(path)
    elif against is not None:
        from holdfast.view.diff import diff_page

        text = diff_page(holdfast.open(path, require=trusted), holdfast.open(against, require=trusted))
    else:
        from holdfast.view.checkpoint import checkpoint_page
        from holdfast.view.traces import read_timeline

        checkpoint = holdfast.open(path, require=trusted)
        spans = read_timeline(LocalPlace(timeline), of=_name(path)) if timeline else None
        if serve:
            _serve(checkpoint, spans, port=port, check=check, browser=browser, json=json)
            return
        text = checkpoint_page(checkpoint, stats=stats or None, timeline=spans, look=check)
    if out == "-":
        sys.stdout.write(text)
        return
    page = LocalPlace(out or f"{_name(path)}.html").absolute()
    _write(page, text.encode())
    if json:
        output.as_json({"page": str(page), "bytes": len(text.encode())})
    else:
        output.say(f"{page}: {output.size(len(text.encode()))}, open it in any browser")
    if browser:
        _browse(page.as_uri())


def _serve(
    checkpoint: Checkpoint, spans: Timeline | None, *, port: int, check: bool | None, browser: bool, json: bool
) -> None:
    from holdfast.view.checkpoint import checkpoint_page, figures
    from holdfast.view.server import Served

    try:
        served = Served(
            lambda: checkpoint_page(checkpoint, timeline=spans, look=check, served=True),
            {"statistics": lambda name: figures(checkpoint, name)},
            port=port,
        )
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ValueError(f"port {port} cannot be had ({error.strerror}): leave out --port, or name another") from None
    with served:
        if json:
            output.as_json({"url": served.url})
        else:
            output.say(f"{served.url}\nOnly this machine can open it, and only with this address. Ctrl-C ends it.")
        sys.stdout.flush()
        if browser:
            _browse(served.url)
        try:
            served.serve_forever()
        except KeyboardInterrupt:  # the way to end it, and no failure
            return


def is_root(path: str) -> bool:
    """Whether a path is the root of a run; a checkpoint is none, nor is a path of a server that cannot list."""
    from holdfast.view.run import is_run

    try:
        return is_run(with_default_deadline(location(path), DEADLINE))
    except StorageError as error:  # opening it says what is wrong
        log.debug("%s: %s", path, error)
        return False


def _name(path: str) -> str:
    text = path.partition("?")[0] if "://" in path else os.path.abspath(path)  # also of "." and ".."
    return text.rstrip("/").rpartition("/")[2].replace("{", "").replace("}", "") or "checkpoint"


def _write(page: LocalPlace, data: bytes) -> None:
    try:
        start = page.read_start(4096)[0]
    except FileNotFoundError:
        start = _OURS
    if _OURS not in start:
        raise ValueError(f"{page} is there, and is no page of holdfast: name another file with -o")
    if not page.parent.is_dir():
        raise ValueError(f"there is no folder {page.parent}: make it, or name another file with -o")
    page.write_small(data)


def _browse(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        output.say("no browser was found here: open the address yourself")
