"""Arguments and options that several commands share, explained in the same words everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Source = Annotated[str, typer.Argument(help="A checkpoint of any format: a path or a URL.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is changed.")]
Tensors = Annotated[str, typer.Option("--tensors", metavar="GLOB", help="Only tensors whose names fit.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a target that is there.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="What floating tensors become: bfloat16, …")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of tensors in one file.")]
ExtraFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--extras",
        metavar="PATH",
        help="For huggingface: config.json and the tokenizer's files, or a folder that has them, such as the base "
        "model's; weights in it are left. May come again.",
    ),
]
