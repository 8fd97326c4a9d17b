"""Why a server cannot be had here: no network, no such tool, another system.

Raised by everything that fetches or starts a server, caught by the fixtures, which skip with it. Never a failed test.
"""

from __future__ import annotations


class Unavailable(Exception):
    """The reason, in one line, as a skipped test shows it."""
