"""The systems compared on an object store, each as two functions: save, and load in place. And raw obstore, the limit.

Called by the jobs of `benchmarks.cloud`, on every rank. A peer is imported when it is first used: it may not be there.
Never tuned: each peer as its documentation shows it. Credentials come from the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from benchmarks.states import State
from benchmarks.systems import Told
from holdfast.buffers.memory import address_of

REGION = "us-east-1"
RAW_PART = "raw"
"""The part of a state that raw obstore moves: the bytes of all others, as one tensor."""
MANIFEST = "manifest"
MIB = 1 << 20


@dataclass(frozen=True)
class Where:
    """A key of a bucket, and the endpoint to reach it through."""

    endpoint: str
    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class System:
    """``raw``: it moves the bytes of a rank as they are, and so can neither load a part nor on other ranks."""

    name: str
    save: Callable[[State, Where, int], None]
    load: Callable[[State, Where, int], Told | None]
    raw: bool = False


def _holdfast_url(where: Where) -> str:
    return f"{where.url}?endpoint_url={where.endpoint}"


def _save_holdfast(state: State, where: Where, rank: int) -> None:
    holdfast.save(state, _holdfast_url(where))


def _load_holdfast(state: State, where: Where, rank: int) -> Told:
    loaded = holdfast.load(_holdfast_url(where), state, only="*" if len(state) > 1 else list(state))
    return Told(loaded.bytes_needed, loaded.bytes_read)


def _fsspec_options(where: Where) -> dict[str, Any]:
    return {
        "endpoint_url": where.endpoint,
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }


def _save_fsspec(state: State, where: Where, rank: int) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dcp_save(state, storage_writer=FsspecWriter(where.url, **_fsspec_options(where)))


def _load_fsspec(state: State, where: Where, rank: int) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    dcp_load(state, storage_reader=FsspecReader(where.url, **_fsspec_options(where)))


def _connector(where: Where, **reading: Any) -> Any:
    """A file system of s3torchconnector: its writer and reader take no endpoint, the client below them does."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    client = S3Client(REGION, endpoint=where.endpoint, s3client_config=S3ClientConfig(force_path_style=True))
    return S3FileSystem(REGION, s3_client=client, **reading)


def _save_connector(state: State, where: Where, rank: int) -> None:
    from s3torchconnector.dcp import S3StorageWriter

    writer = S3StorageWriter(region=REGION, path=where.url)
    writer.fs = _connector(where)
    dcp_save(state, storage_writer=writer)


def _load_connector(state: State, where: Where, rank: int) -> None:
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader

    constructor = S3ReaderConstructor.dcp_optimized()  # as by default; the file system must have the reader's own
    reader = S3StorageReader(region=REGION, path=where.url, reader_constructor=constructor)
    reader.fs = _connector(where, reader_constructor=constructor)
    dcp_load(state, storage_reader=reader)


@dataclass(frozen=True)
class Raw:
    """obstore by itself: one object a rank, in parts of ``part`` bytes, so many at once.

    ``committed``: with what no checkpoint can do without. Each part is summed, and a small object with all sums is put
    once every rank has put its own, and read before anything else.
    """

    part: int
    writers: int
    readers: int
    committed: bool = False

    @property
    def system(self) -> System:
        name = f"{'floor: summed and committed' if self.committed else 'raw obstore'}, {self.part // MIB} MiB"
        return System(name, partial(_save_raw, self), partial(_load_raw, self), raw=True)


@cache
def _store(endpoint: str, bucket: str) -> Any:
    """A client that signs what it sends, as holdfast does where there is no TLS."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=endpoint,
        region=REGION,
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timedelta(minutes=5)},
    )


def _raw_bytes(state: State) -> torch.Tensor:
    return state[RAW_PART]["bytes"]


def _save_raw(raw: Raw, state: State, where: Where, rank: int) -> None:
    import obstore

    store, data = _store(where.endpoint, where.bucket), memoryview(_raw_bytes(state).numpy())
    sums: list[str] = []

    def parts() -> Iterator[memoryview]:
        for begin in range(0, len(data), raw.part):
            part = data[begin : begin + raw.part]
            if raw.committed:
                sums.append(xxhash.xxh3_64_hexdigest(part))
            yield part

    obstore.put(
        store, f"{where.key}/{rank}", parts(),
        use_multipart=True, chunk_size=raw.part, max_concurrency=raw.writers,
    )  # fmt: skip
    if raw.committed:
        of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, sums)
        if rank == 0:
            obstore.put(store, f"{where.key}/{MANIFEST}", json.dumps(of_ranks).encode())
        dist.barrier()


def _load_raw(raw: Raw, state: State, where: Where, rank: int) -> None:
    import obstore

    store, target = _store(where.endpoint, where.bucket), _raw_bytes(state)
    sums: list[str] = []
    if raw.committed:
        sums = json.loads(bytes(obstore.get(store, f"{where.key}/{MANIFEST}").bytes()))[rank]

    def bring(begin: int) -> None:
        found = obstore.get_range(
            store, f"{where.key}/{rank}", start=begin, end=min(begin + raw.part, target.nbytes)
        )  # fmt: skip
        ctypes.memmove(target.data_ptr() + begin, address_of(found), len(found))
        if raw.committed and xxhash.xxh3_64_hexdigest(found) != sums[begin // raw.part]:
            raise ValueError(f"{where.url}/{rank} has another sum at byte {begin}")

    with ThreadPoolExecutor(raw.readers) as pool:
        for done in [pool.submit(bring, begin) for begin in range(0, target.nbytes, raw.part)]:
            done.result()


HOLDFAST, FSSPEC, CONNECTOR = "holdfast", "DCP, fsspec (s3fs)", "DCP, s3torchconnector"
RAWS = [Raw(8 * MIB, writers=12, readers=16), Raw(16 * MIB, writers=8, readers=8)]
RAW_NAMES = [raw.system.name for raw in RAWS]
FLOORS = {raw.system.name: replace(raw, committed=True).system for raw in RAWS}
"""By the name of the setting of raw obstore that each is made from."""
SYSTEMS = {
    system.name: system
    for system in (
        System(HOLDFAST, _save_holdfast, _load_holdfast),
        System(FSSPEC, _save_fsspec, _load_fsspec),
        System(CONNECTOR, _save_connector, _load_connector),
        *(raw.system for raw in RAWS),
        *FLOORS.values(),
    )
}
