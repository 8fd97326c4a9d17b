"""What an error means to a caller: an exit code, a kind, and what to do next.

`app` calls `failure_of` with the exception of a command. It looks at the disk again only if a local path holds no
checkpoint, and changes nothing.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import typer

from holdfast.errors import (
    Damaged,
    HoldfastError,
    Mismatch,
    NotACheckpoint,
    RankLost,
    SaveFailed,
    StorageError,
    Unsupported,
    Untrusted,
)


class Code(IntEnum):
    """The exit codes of all commands. docs/cli.md documents them; their meaning never changes."""

    FINE = 0
    DAMAGED = 1
    DIFFERENT = 1  # of `holdfast diff`, as of `diff`; damage, which has the same code, is an error on standard error
    USAGE = 2
    NOT_A_CHECKPOINT = 3
    STORAGE = 4
    MISMATCH = 5
    RANK_LOST = 6
    FAILED = 7
    INTERRUPTED = 130
    CLOSED = 141


_BY_KIND: tuple[tuple[type[BaseException], Code], ...] = (
    (Damaged, Code.DAMAGED), (NotACheckpoint, Code.NOT_A_CHECKPOINT), (Mismatch, Code.MISMATCH),
    (Unsupported, Code.MISMATCH), (RankLost, Code.RANK_LOST), (StorageError, Code.STORAGE), (SaveFailed, Code.FAILED),
    (HoldfastError, Code.FAILED), (OSError, Code.STORAGE), (ValueError, Code.USAGE),
    (KeyboardInterrupt, Code.INTERRUPTED),
)  # fmt: skip


def code_of(error: BaseException) -> Code | None:
    """The code of an error that a user can cause; None for any other, which is a bug of holdfast."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), None)


@dataclass(frozen=True)
class Failure:
    """An error as commands print it. ``kind`` is one of a few words that programs rely on; ``next`` may be empty."""

    code: Code
    kind: str
    text: str
    next: str = ""


_CONTINUED = ("convert", "copy")
"""Commands that continue from what an interrupted one has left."""

_USAGE: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base of errors in arguments: click's, or the one in the copy of click that newer versions of typer carry."""


def failure_of(error: BaseException, arguments: Sequence[str] = (), places: Sequence[str] = ()) -> Failure | None:
    """The failure that a user sees; None for an error that no user can cause, which is a bug of holdfast.

    ``arguments`` are those of the program. ``places`` are those of them that are neither options nor values of options:
    the hint names the one that the error is about.
    """
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return interrupted(arguments)
    if isinstance(error, _USAGE):
        return _usage(error)
    code = code_of(error)
    if code is None:
        return None
    # A command is one process, so the rank and the host are left out.
    cause = getattr(error, "cause", None) if not isinstance(error, SaveFailed) else None
    text = in_options(cause or str(error) or type(error).__name__)
    command = next((word for word in arguments if not word.startswith("-")), "COMMAND")
    kind, hint = _kind(error, _subject(error, arguments, places), command, arguments)
    if kind == "taken":
        text = text.partition("; choose another path")[0]  # which the hint says too
    return Failure(code, kind, text, hint)


def interrupted(arguments: Sequence[str]) -> Failure:
    """The failure of a command that the user interrupted."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    hint = "the same command continues from here" if command in _CONTINUED else ""
    return Failure(Code.INTERRUPTED, "interrupted", "interrupted", hint)


_SAME = (
    "bandwidth", "base", "decay", "dtype", "extras", "like", "only", "overwrite", "remap", "rename", "require", "save",
    "step", "to", "weights",
)  # fmt: skip
_OPTIONS = {name: f"--{name}" for name in _SAME} | {"max_shard_bytes": "--max-shard-size", "sources": "--from"}
"""Arguments of Python that errors of the library name, and the options of the commands that set them."""
_ARGUMENT = re.compile(rf"(?<![\w/?&.=-])({'|'.join(_OPTIONS)})=(?:True\b)?(?=([\w'\"\[]?))")
_FUNCTION = re.compile(r"\bholdfast\.(?:tools\.)?(convert|copy|repair|rescue|recover|verify)\b")


def in_options(text: str) -> str:
    """The text of an error with the options of commands in the place of Python's arguments and functions."""
    words = _ARGUMENT.sub(lambda match: _OPTIONS[match[1]] + (" " if match[2] else ""), text)
    return _FUNCTION.sub(lambda match: f"holdfast {match[1].replace('recover', 'rescue')}", words)


_SECRET = re.compile(r"://[^/]*@|[?&][^=&]*(key|secret|token|sas|sig|password)[^=&]*=", re.IGNORECASE)
"""A URL with a secret in it: messages show it without its options."""


def _usage(error: Any) -> Failure:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "holdfast"
    text = error.format_message().removeprefix("Invalid value: ").replace("Value error, ", "")  # typer's, of a choice
    hint = "--to huggingface writes safetensors" if "'safetensors' is not one of" in text else f"{path} --help"
    return Failure(Code.USAGE, "usage", text, hint)


def _subject(error: BaseException, arguments: Sequence[str], places: Sequence[str]) -> str:
    """The path that an error is about, as the user wrote it."""
    words = [word for word in arguments if not word.startswith("-")][1:]
    # No error shows the options of a URL, but the next command needs them: the endpoint, for example.
    bare = {word: word.partition("?")[0] if "://" in word else word for word in words}
    named = [word for word in words if bare[word] in str(error) or os.path.abspath(word) in str(error)]
    otherwise = getattr(error, "file", None) or next(iter([*places, *words]), "PATH")
    subject = max(named, key=lambda word: (word in places, len(word)), default=otherwise)
    return bare.get(subject, subject) if _SECRET.search(subject) else subject


def _kind(error: BaseException, path: str, command: str, arguments: Sequence[str]) -> tuple[str, str]:
    from holdfast.doctor.checkpoints import advice

    text, quoted = str(error), shlex.quote(path)
    if isinstance(error, Untrusted):
        return "not trusted", "check whose key it should be: docs/security.md"
    if isinstance(error, Damaged):
        if "cannot be rescued" in text:
            return "damaged", "take an older step of the run, or a copy of this one"
        return "damaged", advice(path) or f"holdfast verify {quoted} lists all damage"
    if isinstance(error, NotACheckpoint):
        if "--like needs" in text:
            return "no checkpoint", "give a folder with config.json and the model's safetensors files"
        return "no checkpoint", advice(path) or f"holdfast doctor {quoted} says what is there"
    if isinstance(error, Unsupported):
        if install := re.search(r"pip install ['\"]?[\w\[\]=<>.-]+['\"]?", text):
            return "missing package", install[0]
        return "unsupported", "docs/formats.md lists what can be read, docs/troubleshooting.md explains this text"
    if isinstance(error, Mismatch):
        if command == "rescue" and "--like" not in arguments:
            return "mismatch", advice(path) or f"holdfast doctor {quoted} says what is there"
        return "mismatch", f"holdfast show {quoted} lists the names in it"
    if isinstance(error, RankLost):
        return "rank lost", "look at the log of that rank; docs/crash-safety.md"
    if isinstance(error, SaveFailed):
        return "failed", "docs/troubleshooting.md explains this text"
    if isinstance(error, OSError):
        return _of_system(error, quoted, command)
    if isinstance(error, ValueError):
        if run := re.search(r"give the folder of its run, (.+)$", text):
            return "usage", f"holdfast {command} {shlex.quote(run[1])}"
        if "://" in text:
            return "usage", "docs/stores.md says how to write the URL of a store"
        return "usage", f"holdfast {command} --help lists the options"
    return "failed", "docs/troubleshooting.md explains this text"


def _of_system(error: OSError, path: str, command: str) -> tuple[str, str]:
    text = str(error)
    if "needs no rescue" in text:
        return "taken", f"nothing, if it opens: holdfast verify {path} reads every byte"
    if "credentials" in text and error.errno == errno.EACCES:
        return "no credentials", f"holdfast doctor {path} says which credentials are used; docs/stores.md"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "no rights", f"holdfast doctor {path} says which rights are missing"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space", "holdfast prune RUN, and the same with --orphans, list what can be deleted"
    if error.errno == errno.EEXIST:
        if "another process" in text or "another save" in text:
            return "busy", "wait until it has ended, and run the same command again"
        return "taken", "choose a target that is free" + (", or --overwrite" if "holds other" not in text else "")
    if "at extras=" in text:
        return "storage", "give a file or a folder that is there"
    if command == "doctor":
        return "storage", "check the path, the server and the network, and run the same command again"
    return "storage", f"holdfast doctor {path} says what is wrong there"
