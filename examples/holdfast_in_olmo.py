"""OLMo-core's trainer saves to holdfast: import this module in the training script, before the trainer is built."""

from typing import Any

from olmo_core.distributed import checkpoint

from holdfast.dcp import Reader, Writer


def writer(path: Any, **_: Any) -> Writer:
    return Writer(path, overwrite=True)


def reader(path: Any, **_: Any) -> Reader:
    return Reader(path)


checkpoint.RemoteFileSystemWriter, checkpoint.RemoteFileSystemReader = writer, reader
