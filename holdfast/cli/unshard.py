"""``holdfast unshard``: a model for inference, in one file or one folder.

Called by `app`. Never takes an optimizer along without being asked for it.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.convert import EXTRAS, Format, bytes_of, dtype_of, extras_of, proved, show
from holdfast.export.huggingface import section_of
from holdfast.ondisk.patterns import TENSOR, selector

_FILES = (".pt", ".pth", ".bin", ".ckpt")


def unshard(
    source: Annotated[str, typer.Argument(help="A checkpoint of any format: a path or a URL.")],
    target: Annotated[str, typer.Argument(help="A file (.pt) for torch.load, or a folder for from_pretrained.")],
    section: Annotated[
        str | None,
        typer.Option("--section", metavar="NAME", help="What the model is called, if not model.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The optimizer and all values too; of a file for torch alone.")
    ] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="What floating tensors become: bfloat16, …")] = None,
    shard: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of tensors in one file.")] = "5GB",
    extras: Annotated[
        list[str] | None,
        typer.Option("--extras", metavar="PATH", help=EXTRAS),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a target that is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Gather the weights of a model: a file that torch.load reads, or safetensors that from_pretrained reads.

    The names in it are those of the model: load_state_dict takes what torch.load makes of the file.
    """
    bare = target.partition("?")[0] if "://" in target else target  # without options of a URL
    to = Format.torch if PurePosixPath(bare).suffix in _FILES else Format.huggingface
    if everything and to is Format.huggingface:
        raise typer.BadParameter("--all goes with a file for torch (.pt): a folder for inference holds weights alone")
    proved(target)
    opened = holdfast.open(source)
    if section is not None:
        selector(section, opened.records, opened.path, said="--section ", what=TENSOR)
    only = "*" if everything else section_of(opened, section or "*") or "*"
    if not json:
        output.say(f"{opened.path}: {'all of it' if everything else f'the tensors of {only!r}'}")
    done = holdfast.convert(
        opened, target, to=to.value, only=only, dtype=dtype_of(dtype), max_shard_bytes=bytes_of(shard),
        rename=None if to is Format.huggingface or only == "*" else _Bare(only),
        extras=extras_of(extras), overwrite=overwrite,
    )  # fmt: skip
    show(done, as_json=json)


class _Bare:
    """Names without the section that they are in."""

    def __init__(self, section: str) -> None:
        self._section = section

    def __call__(self, name: str) -> str:
        return "" if name == self._section else name.removeprefix(f"{self._section}/")
