"""Other people's files: one file a format, from a path to a Manifest and where each piece lies.

`holdfast.open` asks `open_foreign` for a path that holds no checkpoint of ours. Never executes anything that a file
names, and never reads the bytes of a tensor to list it.
"""

from holdfast.formats.assemble import Foreign, materialized
from holdfast.formats.detect import open_foreign
from holdfast.formats.verify import verify_foreign

__all__ = ["Foreign", "materialized", "open_foreign", "verify_foreign"]
