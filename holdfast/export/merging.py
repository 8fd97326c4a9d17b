"""One merge under way on one rank: a conversion of its last source, whose tensors are sums over all sources.

`merge` makes a `MergeWork`. What cannot be summed is refused before a byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import acos, fsum, sin, sqrt

from holdfast.checkpoint import Checkpoint
from holdfast.export import huggingface
from holdfast.export.copying import products_of
from holdfast.export.draft import Draft, Span, share_of, units_of
from holdfast.export.partial import Partial
from holdfast.export.selection import Selection, select
from holdfast.export.terms import Other, with_terms
from holdfast.export.work import ConvertWork, Note, Options, Source
from holdfast.ondisk import names
from holdfast.ondisk.box import whole
from holdfast.ondisk.patterns import matcher, names_in
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.source import ReadStats
from holdfast.storage.place import Place

PARALLEL = 0.9995
"""From this cosine on SLERP is linear: the sine that it divides by is too close to 0."""

Products = dict[str, list[list[float]]]
"""By name: a·a, b·b and a·b of each part of two tensors a and b."""


@dataclass(frozen=True)
class Recipe:
    """What a merge makes of its sources: ``weights`` of all of them, or ``t`` of the spherical way between two.

    ``total``: the dtype that sums are made in. ``model_only``: nothing says what to take.
    """

    weights: tuple[float, ...]
    t: float | None
    total: str
    model_only: bool


class MergeWork(ConvertWork):
    """A `ConvertWork` with several sources, the last of which gives all that is not summed."""

    def __init__(
        self, sources: Sequence[Source], recipe: Recipe, target: Place, options: Options, ranks: Ranks,
        partial: Partial,
    ) -> None:  # fmt: skip
        super().__init__(sources[-1], target, options, ranks, partial)
        self._given, self._recipe = sources, recipe
        self._sources: list[Checkpoint] = []
        self._selection: Selection | None = None
        self._measured: Mapping[str, tuple[float, float]] = {}
        self._read_to_measure = ReadStats()

    def measure(self, call: Call) -> None:
        """For SLERP: read both sources once, and agree with the other ranks on the weights of each tensor."""
        t = self._recipe.t
        if t is not None:
            products = call.exchange("measure", self._products, _joined, dict[str, list[float]])
            self._measured = {name: slerp_weights(aa, bb, ab, t) for name, (aa, bb, ab) in products.items()}

    def _products(self) -> Products:
        self.checkpoint = self._opened()
        leaves = [leaf for leaf in self._select().tensors.values() if leaf.total]
        spans, at = [], 0
        for leaf in leaves:
            spans.append(Span(replace(leaf, dtype=leaf.record.dtype), whole(leaf.shape), "", at))
            at += spans[-1].nbytes
        units = units_of(Draft({}, spans, "none", lambda sums: iter(())))
        share = share_of(units, self.ranks.rank, self.ranks.size)
        products: Products = {}
        for name, parts in products_of(share, verify=self.options.verify, stats=self._read_to_measure):
            products.setdefault(name, []).append(parts)
        return products

    def _opened(self) -> Checkpoint:
        if not self._sources:
            self._sources = [self._open(source) for source in self._given]
            if self._recipe.model_only:
                section = huggingface.section_of(self._sources[-1], "*")
                self.options = replace(self.options, only=section or "*")
        return self._sources[-1]

    def _select(self) -> Selection:
        if self._selection is None:
            self._selection = super()._select()
        section = huggingface.section_of(self.checkpoint, self.options.only) if self.options.to == "huggingface" else ""
        fits = matcher(self.options.only, known=names_in(self.checkpoint.manifest))
        others = [
            Other(source, select(source, lambda name: fits(name) and names.under(name, section)))
            for source in self._sources[:-1]
        ]
        merged = with_terms(self._selection, self.checkpoint, others, self._weights_of, self._recipe.total)
        self.converted.not_summed = [name for name, leaf in merged.tensors.items() if not leaf.total]
        return merged

    def _weights_of(self, name: str) -> Sequence[float]:
        return self._measured.get(name, self._recipe.weights)

    def _stamps(self) -> list[tuple[str, int, str | int]]:
        return list(chain.from_iterable(map(self._stamps_of, self._sources)))

    def copy(self, done: str) -> Note:
        """Copy this rank's share of what is not done."""
        note = super().copy(done)
        self.converted.bytes_read += self._read_to_measure.read
        return note


def _joined(of_ranks: list[Products]) -> dict[str, list[float]]:
    """The products of whole tensors; the same, however the parts are shared among ranks."""
    joined: Products = {}
    for products in of_ranks:
        for name, parts in products.items():
            joined.setdefault(name, []).extend(parts)
    return {name: [fsum(part) for part in zip(*parts, strict=True)] for name, parts in joined.items()}


def slerp_weights(aa: float, bb: float, ab: float, t: float) -> tuple[float, float]:
    """The weights of a and b at ``t`` of the arc between them; linear where they are nearly parallel, or 0."""
    norms = sqrt(aa) * sqrt(bb)
    cosine = ab / norms if norms else 1.0
    if not abs(cosine) <= PARALLEL:  # a NaN too
        return 1 - t, t
    angle = acos(cosine)
    return sin((1 - t) * angle) / sin(angle), sin(t * angle) / sin(angle)
