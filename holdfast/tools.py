"""Tools for checkpoints that are there already: check, mend, sign and merge them, and take parts of them away.

Users and the command call these. Each is defined in `repair` or `export`; nothing here does anything itself.
"""

from holdfast.export.lora import fold_lora
from holdfast.export.merge import merge
from holdfast.repair import signing
from holdfast.repair.drop import drop
from holdfast.repair.recover import recover
from holdfast.repair.repair import repair
from holdfast.repair.rescue import rescue
from holdfast.repair.signing import sign
from holdfast.repair.verify import verify

__all__ = ["drop", "fold_lora", "merge", "recover", "repair", "rescue", "sign", "signing", "verify"]
