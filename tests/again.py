"""Whether so few of the tests have just failed that trying them once more by themselves is worth it.

`make test` asks. Reads what pytest remembers of its last run, and changes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REMEMBERED = Path(".pytest_cache/v/cache/lastfailed")


def main(few: int) -> int:
    """0 if one to ``few`` tests failed."""
    failed = sorted(json.loads(REMEMBERED.read_text())) if REMEMBERED.exists() else []
    print(f"\n{len(failed)} failed beside others; each is tried again by itself:" if failed else "nothing to try again")
    print(*failed, sep="\n")
    return 0 if 0 < len(failed) <= few else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
