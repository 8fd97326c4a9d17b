"""A state that all ranks have gathered, as a `Reader`: what a conversion asks of a checkpoint but for its bytes.

`convert` calls `gather_live`, and `LiveWork` opens the reader. Never reads a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.buffers.memory import no_collection
from holdfast.commit import draft
from holdfast.commit.agree import Agreed, agree, plan_for
from holdfast.commit.draft import Identity
from holdfast.commit.gather import Gathered, gather
from holdfast.commit.job import Job, attempt, value_of
from holdfast.errors import HoldfastError
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.layout import join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call
from holdfast.read.damage import Findings
from holdfast.read.files import AsStored, Files
from holdfast.read.ranges import Verify
from holdfast.remap.nodes import Node, Saved
from holdfast.remap.remapped import Remapped
from holdfast.remap.sections import Mapped, mapped
from holdfast.state.leaves import owned_values
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place

NAME = LocalPlace("the state")
"""What errors call it."""


@dataclass(frozen=True)
class Live:
    """A state that all ranks have gathered and agree on, within a call."""

    call: Call
    job: Job
    gathered: Gathered
    agreed: Agreed

    @cached_property
    def plan(self) -> Plan:
        """Which rank has which boxes. Raises Mismatch where the ranks do not fit together."""
        return plan_for(self.job.ranks, self.agreed)


def gather_live(call: Call, state: Mapping[str, Any]) -> Live:
    """Gather the state, as a save does. All ranks call it; what one of them raises is raised by all."""
    job = Job(call.ranks, None, None, "")
    with no_collection():
        gathered = attempt(gather, job, state, {})
    agreed = agree(call, job, gathered)
    if agreed is None:
        raise HoldfastError("a state was not gathered, as a rank was busy; this is a fault of holdfast")
    return Live(call, job, value_of(gathered), agreed)


class LiveReader:
    """A `Reader` of what the ranks have gathered: its names, shapes, types and values. Its bytes are not read."""

    format, reading, signed_by = "state", "", None

    def __init__(self, live: Live) -> None:
        self.path: Place = NAME
        self.left_out: Mapping[str, str] = {}
        self.attachments: Mapping[str, int] = {}
        self._live = live

    @cached_property
    def manifest(self) -> Manifest:
        job, agreed, state = self._live.job, self._live.agreed, self._live.gathered.state
        owned = agreed.owned or join_owned([self._live.gathered.layout], [(0, 0, owned_values(state))])
        identity = Identity(agreed.save, job.run, None, job.ranks.size)
        return draft.draft(identity, self._live.plan, agreed.values, {}, owned, [])

    @property
    def files(self) -> Files:
        return _InMemory()

    def stored_name(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)

    def attachment(self, name: str) -> bytes:
        raise KeyError(name)

    def per_rank(self, path: str, rank: int) -> Any:
        raise _no_file()

    def verifying(self, verify: Verify) -> Verify:
        return verify

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        raise _no_file()


class _InMemory(AsStored):
    """`Files` of a state: there are none."""

    def _none(self, *args: object) -> Any:
        raise _no_file()

    path = plain = prepare = prove = piece = opened = _none


def _no_file() -> HoldfastError:
    return HoldfastError("bytes of a state in memory were to be read from a file; this is a fault of holdfast")


class RemappedState(Remapped):
    """The same as a map makes it."""

    @cached_property
    def _mapped(self) -> Mapped:
        # Which moments of an optimizer have to be equal is not asked: no target of a live conversion holds them.
        return mapped(self._reader.manifest, self.remap, self.path)

    @property
    def nodes(self) -> dict[str, Node]:
        """How each tensor is made that the state does not hold as it is, by its stored name."""
        made = ((self._stored[name], node) for name, node in self._mapped.tensors.items())
        return {stored: node for stored, node in made if not isinstance(node, Saved)}
