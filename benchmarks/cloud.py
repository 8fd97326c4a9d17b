"""Holdfast on an object store beside DCP with fsspec, DCP with s3torchconnector, and the client library by itself.

Run as `python -m benchmarks.cloud [--quick]`; prints tables and bars, writes JSON. The store is a real S3 server, on
this machine, behind a proxy that makes each request late. Never compares figures of two runs: systems take turns, and
every load is proved.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks

import torch

from benchmarks import cloud_jobs, cloud_report
from benchmarks.cloud_rows import LOAD, LOAD_BY_LESS, MODEL, SAVE, SAVE_BY_MORE, Rows, judge
from benchmarks.cloud_systems import SYSTEMS, Where
from benchmarks.frame import machine, options_of, say, stoppable, write
from benchmarks.gauge import Spent
from benchmarks.jobs import LoadCost
from benchmarks.pool import JobFailed, Pool
from benchmarks.states import Sharded
from tests.servers import Server, Unavailable, ceph
from tests.servers.faults import LATENCY
from tests.servers.faults_process import ProxyProcess

RANKS, MORE = 2, 4
TINY = Sharded(width=32, depth=1, vocabulary=64)

ROOM = 2_300_000_000
"""Bytes that lie in the server at once: it keeps 4 GiB, and what is deleted goes a little later."""

SETTLING = 9.0
"""Seconds after which the server has given back what was deleted, and is quiet again."""


@dataclass(frozen=True)
class Link:
    """The way to the server: through the proxy, or (``latency`` None) straight. ``bandwidth``: bytes a second."""

    name: str
    latency: float | None
    bandwidth: float | None = None


@dataclass(frozen=True)
class Scale:
    """How much is measured: the state; turns of all systems over the first link, over others, and with other ranks."""

    state: Sharded
    turns: int
    others: int
    reshards: int


FULL = Scale(Sharded(width=768, depth=8, vocabulary=32000), turns=5, others=3, reshards=3)
QUICK = Scale(Sharded(width=384, depth=6, vocabulary=26000), turns=3, others=2, reshards=1)


@dataclass
class Bench:
    """One run under way: a server, a proxy before it, a bucket, ranks, rows."""

    server: Server
    proxy: ProxyProcess
    bucket: str
    rows: Rows = field(default_factory=Rows)
    pools: dict[int, Pool] = field(default_factory=dict)
    specs: dict[int, Sharded] = field(default_factory=dict)
    link: Link = field(default_factory=lambda: Link("", None))
    stored: int = 0
    saves: int = 0

    def over(self, link: Link) -> None:
        """From now on the server is reached so."""
        self.link = link
        self.proxy.set_pace(latency=link.latency or 0.0, bandwidth=link.bandwidth)

    def hold(self, ranks: int, spec: Sharded) -> None:
        """Ranks of this world hold this state."""
        pool = self.pools.setdefault(ranks, Pool(ranks))
        pool.run(cloud_jobs.build, spec, ranks == RANKS)
        self.specs[ranks] = spec

    def warm_up(self, ranks: int) -> None:
        """Each system saves and loads a tiny state over this link; what it must import is there afterwards."""
        self.hold(ranks, TINY)
        for name, system in SYSTEMS.items():
            if not system.raw or ranks == RANKS:
                where = self._where(TINY.nbytes)
                try:
                    self.pools[ranks].run(cloud_jobs.save, name, where)
                    self.pools[ranks].run(cloud_jobs.load, name, where, None)
                except JobFailed as error:
                    say(f"warm-up of {name} on {ranks} ranks: {error}")
                    self.hold(ranks, TINY)

    def turn(self, number: int, spec: Sharded) -> None:
        """Every system saves and loads once."""
        for name in _rotated(list(SYSTEMS), number):
            where = self._where(spec.nbytes)
            saved = self._measure(SAVE, name, spec.nbytes, RANKS, cloud_jobs.save, where)
            if saved:
                self._measure(LOAD, name, spec.nbytes, RANKS, cloud_jobs.load, where, None)

    def reshard(self, number: int, spec: Sharded) -> None:
        """Every system that can saves with more ranks than it then loads with: all, and the model alone."""
        part = spec.nbytes // 3  # the rest are two moments of each parameter
        for name in _rotated([name for name, system in SYSTEMS.items() if not system.raw], number):
            where = self._where(spec.nbytes)
            if self._measure(SAVE_BY_MORE, name, spec.nbytes, MORE, cloud_jobs.save, where):
                self._measure(LOAD_BY_LESS, name, spec.nbytes, RANKS, cloud_jobs.load, where, None)
                self._measure(MODEL, name, part, RANKS, cloud_jobs.load, where, "model")

    def _measure(
        self, work: str, name: str, nbytes: int, ranks: int, job: Callable[..., Spent | LoadCost], *args: object
    ) -> bool:
        """One repetition into its row; a failure is noted there, and the ranks come back with their state."""
        row = self.rows.of(self.link.name, work, name, nbytes)
        if row.error:
            return False
        self.proxy.clear()
        proxy = self.proxy.cpu_seconds()
        try:
            answers = self.pools[ranks].run(job, name, *args)
        except JobFailed as error:
            row.error = str(error)
            say(f"{row.link}: {work}: {name}: {error}")
            self.hold(ranks, self.specs[ranks])
            return False
        needed = sum(a.needed for a in answers if isinstance(a, LoadCost))
        if needed not in (0, nbytes):
            raise ValueError(f"{work} is of {needed} bytes, not {nbytes}")
        row.add(answers)
        if self.link.latency is not None:
            row.add_seen(self.proxy.requests(), self.proxy.cpu_seconds() - proxy)
        say(cloud_report.line(row))
        return True

    def _where(self, nbytes: int) -> Where:
        """A fresh key, in a server that has room for so many bytes."""
        if self.stored + nbytes > ROOM:
            self.empty()
        self.stored += nbytes
        self.saves += 1
        endpoint = self.server.endpoint if self.link.latency is None else self.proxy.endpoint
        return Where(endpoint, self.bucket, f"run/{self.saves:04d}")

    def empty(self) -> None:
        """Delete all, and wait until the server has settled."""
        import obstore
        from obstore.store import from_url

        server = self.server
        url = server.url(self.bucket)
        store = from_url(url, config=server.options, client_options=server.client_options)
        for listed in obstore.list(store):
            obstore.delete(store, [meta["path"] for meta in listed])
        self.stored = 0
        time.sleep(SETTLING)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def measure_all(bench: Bench, scale: Scale, links: list[Link]) -> None:
    """Every work of the bench; with other ranks over the first link only."""
    for link in links:
        bench.over(link)
        bench.warm_up(RANKS)
        bench.hold(RANKS, scale.state)
        bench.empty()
        for number in range(scale.turns if link is links[0] else scale.others):
            bench.turn(number, scale.state)
    bench.over(links[0])
    bench.warm_up(MORE)
    bench.hold(MORE, scale.state)
    for number in range(scale.reshards):
        bench.reshard(number, scale.state)


def facts_of(scale: Scale, seconds: float) -> dict[str, object]:
    """What one must know to read the figures."""
    bars = "of the first link" if scale is FULL else "made for the full size: here what any save costs weighs more"
    return {
        "state": f"{scale.state.nbytes / 1e9:.2f} GB in {scale.state.tensors} tensors, float32, sharded on axis 0",
        "repetitions": f"{scale.turns} saves and loads over the first link, {scale.others} over others, "
        f"{scale.reshards} with other ranks; in turns, order rotated, always to a fresh key",
        "server": "Ceph RGW and its object store, in memory; it, the proxy and the ranks share the cores",
        "CPU": "of the ranks, their threads and children; not of the server and the proxy",
        "memory": "peak resident bytes above those at the start (VmHWM)",
        "bars": bars,
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "obstore", "s3fs", "s3torchconnector")),
        **machine(),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """The command."""
    parser = options_of("cloud", __doc__, quick="a quarter of a gigabyte and fewer turns", writes=False)
    parser.add_argument("--bandwidth", type=float, metavar="MB", help="also over a link of so many MB a second")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    late = f"{LATENCY * 1e3:.0f} ms late"
    links = [Link(f"each request {late}", LATENCY), Link("no latency, no proxy", None)]
    if options.bandwidth:
        links.append(Link(f"{late}, {options.bandwidth:g} MB/s", LATENCY, options.bandwidth * 1e6))
    began = time.monotonic()
    with stoppable(), ExitStack() as stack:
        try:
            server = ceph.start()
        except Unavailable as reason:
            print(f"There is no S3 server here, so there is nothing to measure: {reason}")
            return 0
        stack.callback(server.stop)
        _settle_environment(server)
        bench = Bench(server, stack.enter_context(ProxyProcess(server.endpoint)), server.bucket())
        stack.callback(bench.close)
        measure_all(bench, scale, links)
    bars = judge(bench.rows, links[0].name)
    facts = facts_of(scale, time.monotonic() - began)
    cloud_report.show(bench.rows, bars, facts)
    write(options.out, facts, bench.rows.plain(), bars)
    return 0


def _settle_environment(server: Server) -> None:
    """What the ranks and every client in them find; nothing of whoever runs this."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(
        AWS_ACCESS_KEY_ID=server.options["access_key_id"],
        AWS_SECRET_ACCESS_KEY=server.options["secret_access_key"],
        AWS_REGION=server.options["region"],
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
    )


def _version(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "not here"


def _rotated(names: list[str], turn: int) -> list[str]:
    at = turn % len(names)
    return names[at:] + names[:at]


if __name__ == "__main__":
    sys.exit(main())
