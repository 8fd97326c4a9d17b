"""Saves beside training: what a caller holds of one (`Saving`), its thread, and what keeps its tensors from changing.

`holdfast.saver` is built on it. Never queues saves without bound, and never runs a collective.
"""

from holdfast.saving.saving import Saving, Timing

__all__ = ["Saving", "Timing"]
