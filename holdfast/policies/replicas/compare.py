"""Replicas that should hold the same bytes: each rank sums its own, and the sums are compared before the commit.

The policies call `ReplicaSums.take` while the tensors hold still and `compare` before the ranks settle. Compares bytes,
so NaNs count as what they are. Never reads what one rank alone holds, and usually sends 16 bytes a group of holders.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
import xxhash

from holdfast.buffers.device import Copier
from holdfast.buffers.stage import contiguous_parts, host_view
from holdfast.errors import Mismatch
from holdfast.ondisk import names
from holdfast.ondisk.box import Box, covers
from holdfast.ondisk.patterns import Patterns, matcher
from holdfast.plan.holders import Holders
from holdfast.plan.owners import PlannedTensor
from holdfast.plan.plan import Plan
from holdfast.policies.incremental.fingerprint import Fingerprints, applies
from holdfast.ranks.ranks import Call
from holdfast.state import Collected
from holdfast.write.datafiles import memory_of

THREADS = 2
"""Threads that sum host memory."""

_ASKED = 8  # distinct states of one group of holders whose sums are sent one by one
_SHOWN = 20


class Replica(NamedTuple):
    """A box of a tensor that several ranks hold: who they are, as a digest, and the sum of this rank's bytes."""

    group: bytes
    label: str
    sum: bytes
    buffer: bool


def compared_by(check_replicas: bool | Patterns) -> Callable[[str], bool] | None:
    """Which names to compare over the ranks that hold them; None if none is."""
    if isinstance(check_replicas, bool):
        return (lambda name: True) if check_replicas else None
    patterns = (check_replicas,) if isinstance(check_replicas, str) else tuple(check_replicas)
    out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    fits, is_out = matcher(wanted, "check_replicas="), matcher(out, "check_replicas=!") if out else lambda name: False
    return lambda name: fits(name) and not is_out(name)


@dataclass
class ReplicaSums:
    """What this rank has summed of a save so far, of the names that are ``compared``. ``sections`` are done."""

    compared: Callable[[str], bool]
    replicas: list[Replica] = field(default_factory=list)
    sections: set[str] = field(default_factory=set)

    def take(
        self, state: Collected, plan: Plan, rank: int, save: str, copier: Copier, only: Collection[str] | None = None
    ) -> None:
        """Sum what ``rank`` holds and others hold too, of the sections ``only`` (default: all that are left)."""
        names_left = {
            name: tensor
            for name, tensor in plan.tensors.items()
            if (section := names.section_of(name)) not in self.sections and (only is None or section in only)
        }
        self.sections.update({names.section_of(name) for name in names_left} if only is None else only)
        wanted = {name: tensor for name, tensor in names_left.items() if self.compared(name)}
        self.replicas += sums_of(state, wanted, rank, save, copier)


def sums_of(
    state: Collected, tensors: Mapping[str, PlannedTensor], rank: int, save: str, copier: Copier
) -> list[Replica]:
    """A sum of every box of ``tensors`` that ``rank`` holds and others hold too, in the order of the plan.

    In host memory XXH3-64 of the bytes; on a device the device's own fingerprint, with coefficients drawn from the
    save's id, so that all ranks draw the same. Ranks that hold a box on another kind of device are not compared.
    """
    shared: dict[PlannedTensor, list[tuple[Box, Holders]]] = {}
    held: list[tuple[str, PlannedTensor, Box, Holders, torch.Tensor]] = []
    for name, tensor in tensors.items():
        boxes = shared.get(tensor)
        if boxes is None:
            boxes = shared[tensor] = [(box, who) for box, who in tensor.lie.of(rank) if len(who) > 1 and box.size]
        held += ((name, tensor, box, who, memory_of(state, name, box)) for box, who in boxes)
    prints = Fingerprints(hashlib.blake2b(save.encode(), digest_size=32).digest()).take(
        ((name, box, memory) for name, _, box, _, memory in held), copier
    )
    lines = _dealt([memory for *_, memory in held if not applies(memory)])
    with ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-sum") as pool:
        done = list(pool.map(lambda line: [(id(memory), _sum(memory)) for memory in line], lines))
    sums = {which: total for line in done for which, total in line}
    groups: dict[tuple[Holders, bool], bytes] = {}
    replicas = []
    for name, tensor, box, who, memory in held:
        kind = (who, applies(memory))
        if kind not in groups:
            groups[kind] = hashlib.blake2b(repr(kind).encode(), digest_size=8).digest()
        label = name if covers(box, tensor.shape) else f"{name}{box}"
        total = prints[name, box] if applies(memory) else sums[id(memory)]
        replicas.append(Replica(groups[kind], label, total, tensor.first))
    return replicas


def _dealt(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Shares of about as many bytes for each thread."""
    lines: list[list[torch.Tensor]] = [[] for _ in range(THREADS)]
    filled = [0] * THREADS
    for tensor in tensors:
        least = filled.index(min(filled))
        lines[least].append(tensor)
        filled[least] += tensor.nbytes
    return lines


def _sum(tensor: torch.Tensor) -> bytes:
    state = xxhash.xxh3_64()
    for part in contiguous_parts(tensor):
        state.update(host_view(part.data_ptr(), part.nbytes))
    return state.digest()


class _Asked(msgspec.Struct, array_like=True):
    """Groups of holders whose members differ, each with the ranks that are to tell their sums one by one."""

    group: bytes
    ranks: list[int]


def compare(call: Call, sums: Callable[[], ReplicaSums]) -> None:
    """Compare the replicas of all ranks: one round, and a second one if some differ. Raises what every rank raises.

    ``sums`` gives this rank's sums, or raises why there are none.
    """
    own: list[Replica] = []
    seen: dict[bytes, dict[bytes, list[int]]] = {}  # known to the first rank: group → digest of all its sums → ranks

    def describe() -> list[tuple[bytes, bytes]]:
        own.extend(sums().replicas)
        joined: dict[bytes, xxhash.xxh3_64] = {}
        for replica in own:
            joined.setdefault(replica.group, xxhash.xxh3_64()).update(replica.sum)
        return [(group, state.digest()) for group, state in joined.items()]

    def decide(of_ranks: list[list[tuple[bytes, bytes]]]) -> list[_Asked]:
        for rank, groups in enumerate(of_ranks):
            for group, total in groups:
                seen.setdefault(group, {}).setdefault(total, []).append(rank)
        asked = []
        for group, states in seen.items():
            if len(states) > 1:
                most = sorted(states.values(), key=len, reverse=True)[:_ASKED]
                asked.append(_Asked(group, [ranks[0] for ranks in most]))
        return asked

    asked = call.exchange("replicas", describe, decide, list[_Asked])
    if not asked:
        return
    groups = {one.group for one in asked if call.ranks.rank in one.ranks}
    call.exchange(
        "diverged",
        lambda: [(r.group, r.label, r.sum, r.buffer) for r in own if r.group in groups],
        lambda lines: _raise(seen, asked, lines, call.ranks.main.hosts),
        bool,
    )


_Line = tuple[bytes, str, bytes, bool]


def _raise(
    seen: Mapping[bytes, Mapping[bytes, list[int]]], asked: Sequence[_Asked], lines_of: Sequence[Sequence[_Line]],
    hosts: Sequence[str] | None,
) -> bool:  # fmt: skip
    """On the first rank: Mismatch, with every tensor that differs and the ranks that are off."""
    lines, buffers = [], False
    for one in asked:
        alike = {ranks[0]: ranks for ranks in seen[one.group].values()}
        by_label: dict[str, dict[bytes, list[int]]] = {}
        for rank in one.ranks:
            for group, label, total, buffer in lines_of[rank]:
                if group == one.group:
                    by_label.setdefault(label, {}).setdefault(total, []).extend(alike[rank])
                    buffers |= buffer and len(by_label[label]) > 1
        lines += [_verdict(label, sums, hosts) for label, sums in by_label.items() if len(sums) > 1]
    shown = lines[:_SHOWN] + ([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
    hint = (
        "Buffers (a BatchNorm's running statistics, say) may differ under DDP: leave them out, "
        'check_replicas=("*", "!*running_*"), or synchronise them. '
        if buffers
        else ""
    )
    raise Mismatch(
        f"{len(lines)} replicated {'tensor differs' if len(lines) == 1 else 'tensors differ'} between ranks that "
        "should hold the same bytes:"
        + "".join(f"\n    {line}" for line in shown)
        + f"\n{hint}Restore an earlier step if training should have kept them equal: a rank has lost step with the "
        "others, or a bit of its memory flipped. What is meant to differ is saved as holdfast.PerRank(…), or left out "
        'of the comparison: check_replicas=("*", "!name")'
    )


def _verdict(label: str, ranks_of: Mapping[bytes, list[int]], hosts: Sequence[str] | None) -> str:
    """Who is off: all but the majority, or all if there is none."""
    counts = Counter({total: len(ranks) for total, ranks in ranks_of.items()})
    (most, count), held = counts.most_common(1)[0], counts.total()
    if 2 * count > held:
        off = sorted(rank for total, ranks in ranks_of.items() if total != most for rank in ranks)
        return f"{label}: on {_named(off, hosts)}, against {count} that agree ({_some(sorted(ranks_of[most]))})"
    all_of = sorted(rank for ranks in ranks_of.values() for rank in ranks)
    return f"{label}: between {_named(all_of, hosts)}, and no majority tells which is right"


def _named(ranks: Sequence[int], hosts: Sequence[str] | None) -> str:
    named = [f"rank {r}" + (f" ({hosts[r]})" if hosts and hosts[r] else "") for r in ranks[:_ASKED]]
    return " and ".join(named) + (f" and {len(ranks) - _ASKED} more" if len(ranks) > _ASKED else "")


def _some(ranks: Sequence[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks[:_ASKED])) + (", …" if len(ranks) > _ASKED else "")
