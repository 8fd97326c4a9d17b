"""Whether a restore that tries one step after the other leaves the state filled in part.

What restores has one around its attempts. Never loads anything.
"""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast.load import PARTLY_FILLED


class Attempts:
    """Loads into one state, tried one after the other: an error that ends them says so if one has filled it in part."""

    def __init__(self) -> None:
        self._filled = False

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._filled and isinstance(error, HoldfastError) and not str(error).endswith(PARTLY_FILLED):
            said = f"\n{PARTLY_FILLED.removeprefix('; ')}" if "\n" in str(error) else PARTLY_FILLED
            error.args = (f"{error}{said}",)

    def failed(self, error: Exception) -> str:
        """Why a load failed, for the log: the next one fills all of the state."""
        text = str(error).removesuffix(PARTLY_FILLED)
        self._filled = self._filled or text != str(error)
        return text
