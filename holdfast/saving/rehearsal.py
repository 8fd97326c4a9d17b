"""A save without a byte: all that the first save would do before it copies, so that it stalls no more than later ones.

`Saver.prepare` calls `rehearse`. Never writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.buffers.memory import no_collection
from holdfast.commit.agree import agree
from holdfast.commit.gather import gather
from holdfast.commit.job import Job, attempt, value_of
from holdfast.commit.outgoing import lay_out
from holdfast.errors import HoldfastError
from holdfast.policies.points import Policies
from holdfast.state import Recall
from holdfast.write.pool import BufferPool


def rehearse(job: Job, state: Mapping[str, Any], recall: Recall, pool: BufferPool, *, deadline: float) -> list[Any]:
    """Agree on the plan, and take memory and start the writer for it. Returns the optimizers of the state.

    All ranks call it. Raises HoldfastError, the same on every rank.
    """
    with no_collection():
        gathered = attempt(gather, job, state, {}, recall)
    with job.ranks.call("prepare", deadline=deadline) as call:
        agreed = agree(call, job, gathered)

        def reserve() -> bool:
            if agreed is None:
                raise HoldfastError("a rehearsal was skipped; this is a fault of holdfast")
            own = value_of(gathered)
            outgoing = lay_out(job, agreed, own, pool.lease(), Policies(job))
            sizes = [*outgoing.sizes, *outgoing.sizes_to_come]
            if own.state.changes.to_come and not any(sizes):
                sizes = [1]  # small state that is to come may be this rank's to write
            pool.prepare(sizes, pinned=outgoing.on_device)
            return True

        call.settle("reserve", reserve, lambda notes: True, bool)
    return value_of(gathered).state.changes.optimizers
