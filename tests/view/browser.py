"""A real Chromium for the tests of pages, and what they ask of it."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Where a browser is looked for. The one without windows needs half the CPU time of `chromium`."""

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--font-render-hinting=none",
)  # fmt: skip


def chromium() -> str | None:
    """The browser of ``HOLDFAST_CHROMIUM``, or one of the usual names in PATH; None if there is none."""
    named = os.environ.get("HOLDFAST_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


def script(name: str) -> str:
    """A script of scripts/: a function that is evaluated in a page."""
    return (Path(__file__).parent / "scripts" / f"{name}.js").read_text(encoding="utf-8")


def with_script(text: str, code: str) -> str:
    """The page with one more script at its end that its policy allows: to call the frame from a test."""
    proof = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = text.replace("script-src ", f"script-src 'sha256-{proof}' ", 1)
    return allowed.replace("</body>", f"<script>{code}</script></body>")


class Tab:
    """A page in a context of its own, which remembers what went wrong in it and what it asked of the network."""

    def __init__(self, browser: Any, *, scheme: str = "light", width: int = 1360, height: int = 900) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", locale="en-GB",
            timezone_id="UTC", permissions=[],
        )  # fmt: skip
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, path: Path | str) -> Any:
        """Show a file or a URL and wait until the page has drawn itself."""
        self.page.goto(path.as_uri() if isinstance(path, Path) else path)
        # No `wait_for_function` in any test: it evaluates texts in the page, which the page's policy forbids.
        self.page.wait_for_selector("html[data-ready='1']", state="attached")
        return self.page

    def network(self) -> list[str]:
        """Requests that are no files, no data in the page."""
        return [url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))]

    def close(self) -> None:
        self.context.close()
