"""Where policies enter a save: before its files are staged, before it is committed, and when ranks are lost.

`save` and the Saver make `Policies` for each save and hand them on. Each policy is a folder here, with one function for
each point. Nothing else of a save knows that there are policies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast import events
from holdfast.buffers.device import Copier
from holdfast.commit.gather import Gathered
from holdfast.commit.job import Failed, Job
from holdfast.commit.outgoing import Outgoing
from holdfast.errors import RankLost
from holdfast.ondisk import blocks
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.signature import SignedFile
from holdfast.policies.degraded.failover import Spares, fail_over
from holdfast.policies.incremental.fingerprint import Prints, fingerprints_of
from holdfast.policies.incremental.reuse import open_base, reuse
from holdfast.policies.replicas.compare import ReplicaSums, compare
from holdfast.ranks.ranks import Call


class Policies:
    """The policies of one save on one rank, and what they keep until it is over."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prints: Prints = {}
        self._spares = Spares()
        self._sums = ReplicaSums(job.compared or (lambda name: False))
        self._looked_into_base = False

    def before_staging(self, outgoing: Outgoing, sections: Collection[str] | None) -> None:
        """Reuse what a base has; copy and sum what other ranks may need, of these sections or of those left."""
        job, plan, gathered, save = self._job, outgoing.plan, outgoing.gathered, outgoing.agreed.save
        rank, copier = job.ranks.rank, Copier(gathered.moments)
        if job.base is not None and not self._looked_into_base:
            reused = reuse(
                open_base(job.base, job.place), outgoing.files, plan, rank, job.place, opened=outgoing.opened,
                fingerprints=fingerprints_of(job.ranks), copier=copier,
            )  # fmt: skip
            outgoing.files, outgoing.reused, self._prints = reused.files, reused.reused, reused.prints
            self._looked_into_base = True
        if outgoing.agreed.failover is not None and job.background:  # tensors may change before ranks are known lost
            self._spares.keep(plan, gathered.state, job.ranks, sections, gathered.moments)
        if job.compares:
            self._sums.take(gathered.state, plan, rank, save, copier, only=sections)

    def before_commit(self, call: Call, staged: Failed | None) -> None:
        """Compare the sums of replicas. Raises what every rank raises, Mismatch if they differ."""

        def sums() -> ReplicaSums:
            if staged is not None:
                raise staged.error
            return self._sums

        compare(call, sums)

    def sign(self, gathered: Gathered, record: Manifest, files: Sequence[SignedFile]) -> bytes | None:
        """The signature of the manifest. Its sums were taken from memory, not from disk."""
        if gathered.signer is None:
            return None
        attachments = {name: blocks.strong_sum(data) for name, data in gathered.attachments.items()}
        return gathered.signer(record, files, attachments)

    def ranks_lost(self, lost: RankLost, call: Call, outgoing: Outgoing, task: events.Task) -> None:
        """Write and commit the share of the lost ranks. Raises RankLost if that cannot be done."""
        fail_over(lost, call, outgoing, self._spares if self._job.background else None, task)

    def committed(self, save: str) -> None:
        """Remember fingerprints for the next incremental save."""
        if self._job.base is not None:
            fingerprints_of(self._job.ranks).remember(save, self._prints)

    def close(self) -> None:
        """Let the copies go."""
        self._spares.clear()
