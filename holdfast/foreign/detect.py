"""Which format a path is of: each reader is asked in turn, the most particular first.

`holdfast.open` calls `open_foreign` where there is no checkpoint of ours. Never decides by a file's name alone.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from holdfast.engine.memory import no_collection
from holdfast.foreign.assemble import Foreign, assemble

# Each is asked with `read(path)`, which returns None for what is not its format. Those that look for a file of a name
# that nobody else uses come first; what is anything else is left to the general ones. They are imported when the first
# foreign path is opened: a program that reads none pays nothing.
_READERS = (
    "torchsnapshot", "torch_checkpointing", "megatron", "olmo", "deepspeed", "composer", "hfai", "dcp", "huggingface",
    "rank_files", "full",
)  # fmt: skip


def open_foreign(path: Path) -> Foreign | None:
    """The foreign checkpoint at ``path``, or None if there is none that is known.

    ``path``: a folder, a file, or a template with ``{rank}``. Raises Damaged, Unsupported, StorageError.
    """
    with no_collection():  # a large one is hundreds of thousands of objects, of which none is garbage
        for name in _READERS:
            found = import_module(f"holdfast.foreign.{name}").read(path)
            if found is not None:
                return assemble(found, path)
    return None
