"""The rule that does what transformers does between a hub folder and a model of one of its architectures.

`Remap` applies it, `pretrained` does what it says. Never knows an architecture by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.remap.conversion import Conversion
from holdfast.remap.rule import Names, Rule, Scope

if TYPE_CHECKING:
    from holdfast.remap.pretrained import Resolved


class Transformers(Rule, frozen=True, tag="transformers"):
    """From a hub folder to the model that ``from_pretrained`` makes of it, or back to what ``save_pretrained`` writes.

    ``architecture``: the class of the model. ``config``: its config.json without what changes no tensor. ``dtype``:
    what tensors of the model's dtype become, as in ``from_pretrained``; None leaves all as they are. ``used``: the
    conversions that ``from_pretrained`` used for this model and ``save_pretrained`` undoes; None if it was made in
    another way.
    """

    architecture: str
    config: dict[str, Any]
    back: bool = False
    dtype: str | None = None
    used: tuple[Conversion, ...] | None = None

    def __repr__(self) -> str:
        return f"Transformers({self.architecture!r}, {{{len(self.config)} options}}, back={self.back})"

    def resolve(self, names: Names, scope: Scope) -> Names:
        """As a rule does. Tensors of which none is the model's are not a model, and stay as they are.

        Going back, tensors that the config ties are written once if they are one tensor in the source, too.
        """
        return self.resolved(names, moments=scope.moments).nodes

    def resolved(self, names: Names, *, moments: bool = False) -> Resolved:
        """As ``resolve``, with the names that the target lacks, and those of the source that it has no place for."""
        from holdfast.remap import pretrained  # most programs that import holdfast need none of it

        empty = pretrained.Empty(self.architecture, self.config, None if moments else self.dtype, self.used)
        resolved = (pretrained.saved if self.back else pretrained.loaded)(empty, names)
        if self.back or not moments:
            return resolved
        return resolved._replace(nodes=pretrained.first_names(empty, resolved.nodes))

    def inverse(self) -> Transformers:
        return msgspec.structs.replace(self, back=not self.back)
