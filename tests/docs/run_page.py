"""Runs one page, in the process and the folder that are its own: blocks in order, python in one namespace.

Called by the warm process. The first block that does not do what its page says ends it, with the reason on standard
error. Paths that pages use are below the folder here, and stores are one local server: see `Places`.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.matching import matches
from tests.docs.pages import Block, blocks_of

PAGE_SECONDS = 240.0
"""After these a page ends, and says where it stands."""
SHELL_SECONDS = 200.0
MARK = "\x01"
"""Between what two commands of one shell print."""


class Wrong(Exception):
    """A block does not do what its page says."""


@dataclass
class Places:
    """Where the paths and URLs of pages lie here, there and back.

    Every store is one S3 server (``endpoint``), in which a bucket of the page is ``<bucket>-<suffix>``, or
    ``<scheme>-<bucket>-<suffix>``; what pages read from a web server lies there in a bucket by the name of the host.
    """

    folder: Path
    endpoint: str
    suffix: str
    back: dict[str, str] = field(default_factory=dict)

    PATHS = re.compile(r"(?<![\w.:/~*}<\[-])/(?!(?:bin|dev|etc|lib|lib64|proc|root|sys|usr|var)\b)(?=[a-z])")
    STORES = re.compile(
        r"\b(?P<scheme>s3|gs|az|abfss|r2|weka)://(?P<bucket>[\w.-]+)(?:@[\w.-]+)?(?P<key>[^\s\"'`?,]*)(?P<query>\?account=\w+)?"
    )
    WEB = re.compile(r"\bhttps://(?P<host>huggingface\.co|example\.org)(?=/)")
    LAB = "http://10.0.0.5:9000"

    def there(self, text: str) -> str:
        text = self.PATHS.sub(f"{self.folder}/", text)
        text = self.STORES.sub(self._store, text)
        text = self.WEB.sub(lambda web: self._noted(f"{self.endpoint}/{web['host']}-{self.suffix}", web[0]), text)
        return text.replace(self.LAB, self.endpoint)

    def _store(self, url: re.Match[str]) -> str:
        scheme = url["scheme"]
        bucket = f"{'' if scheme == 's3' else scheme + '-'}{url['bucket']}-{self.suffix}"
        self._noted(f"s3://{bucket}", f"{scheme}://{url['bucket']}")
        return f"s3://{bucket}{url['key']}"

    def _noted(self, here: str, page: str) -> str:
        self.back[here] = page
        return here

    def as_shown(self, text: str) -> str:
        """What was printed, in the page's words."""
        for here, page in {**self.back, f"{self.folder}/": "/", str(self.folder): ""}.items():
            text = text.replace(here, page)
        return text


def run(page: str) -> int:
    faulthandler.dump_traceback_later(PAGE_SECONDS, exit=True)
    folder = Path.cwd()
    places = Places(folder, os.environ.get("HOLDFAST_DOCS_STORE", ""), os.environ.get("HOLDFAST_DOCS_SUFFIX", ""))
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    try:
        for block in blocks_of(page):
            if block.prints:
                check(block, block.text, places.as_shown(printed))
            elif not block.not_run:
                printed = run_block(block, places, namespace)
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    for held in list(namespace.values()):  # as a program's end would: what is under way in the background is waited for
        if type(held).__name__ in ("CheckpointManager", "Saver"):
            held.close()
    return 0


def run_block(block: Block, places: Places, namespace: dict[str, Any]) -> str:
    if block.file:
        target = Path(places.there(block.file))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(places.there(block.text))
    elif block.language == "python":
        return run_python(block, places, namespace)
    elif block.language == "console":
        run_console(block, places)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        import tomllib

        tomllib.loads(block.text)
    elif block.language == "yaml":
        import yaml

        list(yaml.safe_load_all(block.text))
    return ""


def run_python(block: Block, places: Places, namespace: dict[str, Any]) -> str:
    out = io.StringIO()
    try:
        code = compile("\n" * (block.line - 1) + places.there(block.text), block.page, "exec")
        with redirect_stdout(out):
            exec(code, namespace)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if block.raises and block.raises.rpartition(".")[2] in kinds:
            return out.getvalue()
        raise Wrong(f"{block.where}: raised\n{traceback.format_exc()}") from None
    if block.raises:
        raise Wrong(f"{block.where}: did not raise {block.raises}")
    return out.getvalue()


def run_console(block: Block, places: Places) -> None:
    commands = commands_of(block.text)
    script = "".join(f'{command}\nprintf "{MARK}%d{MARK}" $?\n' for command, _ in commands)
    told = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-c", places.there(script)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=told, timeout=SHELL_SECONDS,
    )  # fmt: skip
    said = done.stdout.split(MARK)
    for number, (command, shown) in enumerate(commands):
        if 2 * number + 1 >= len(said):
            raise Wrong(f"{block.where}: the shell ended before `{command}`, having said\n{done.stdout}")
        printed, code = places.as_shown(said[2 * number]), said[2 * number + 1]
        if shown:
            check(block, shown, printed, command)
        elif code != "0":
            raise Wrong(f"{block.where}: `{command}` ended with {code}, and said\n{printed}")


def commands_of(text: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what is shown below it. A backslash at the end goes on in the next line."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.split("\n"):
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif found[-1][0][-1].endswith("\\") and not found[-1][1]:
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(shown).strip("\n")) for command, shown in found]


def check(block: Block, shown: str, printed: str, command: str = "") -> None:
    if not matches(shown, printed):
        said = f"`{command}` printed" if command else "what was printed is"
        raise Wrong(f"{block.where}: {said}\n\n{printed}\n\nand the page shows\n\n{shown}\n")
