"""More data files than descriptors, and descriptors that run out: each trial in a process of its own.

`test_descriptors.py` starts it with TRIAL FOLDER LIMIT …; prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import holdfast


def state(sections: int, seed: float = 1.0) -> dict[str, Any]:
    """Many first keys, so many data files; every seventh holds nothing but an empty tensor."""
    return {
        f"agent{i}": {"w": torch.full((0 if i % 7 == 6 else 5,), seed * i), "b": torch.full((0,), seed)}
        for i in range(sections)
    }


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_whole(path: Path, sections: int, seed: float) -> None:
    holdfast.tools.verify(path)
    into = state(sections, 0.0)
    holdfast.load(path, into)
    expected = state(sections, seed)
    for key, section in expected.items():
        for name, tensor in section.items():
            assert torch.equal(into[key][name], tensor), (key, name)


def more_files_than_descriptors(folder: Path, sections: int) -> dict[str, Any]:
    """Everything that opens the data files of a checkpoint, on one with more of them than may be open at once."""
    before = descriptors()
    holdfast.save(state(sections), folder / "saved")
    is_whole(folder / "saved", sections, 1.0)
    holdfast.save(state(sections, 2.0), folder / "saved", overwrite=True)
    is_whole(folder / "saved", sections, 2.0)
    for worker in ("thread", "process"):
        with holdfast.Saver(worker=worker) as saver:  # type: ignore[arg-type]
            saver.prepare(state(sections))
            first = saver.save(state(sections, 3.0), folder / worker)
            saver.save(state(sections, 3.0), folder / f"{worker} again", base=first).wait()
        for name in (worker, f"{worker} again"):
            is_whole(folder / name, sections, 3.0)
    for kind in ("holdfast", "dcp", "torch"):
        holdfast.convert(folder / "saved", folder / f"as {kind}", to=kind)  # type: ignore[arg-type]
    is_whole(folder / "as holdfast", sections, 2.0)
    is_whole(folder / "as dcp", sections, 2.0)
    holdfast.copy(folder / "saved", folder / "copied")
    is_whole(folder / "copied", sections, 2.0)
    return {"before": before, "after": descriptors()}


def none_left(folder: Path, kind: str) -> list[str]:
    """With ever more descriptors free: what a save does, whether it leaves any open, and whether the next works."""
    small, wrong = state(20), []
    holdfast.save(small, folder / "warm")
    with holdfast.Saver() as saver:
        saver.save(small, folder / "warm too").wait()
    before = descriptors()
    outcomes = set()
    for free in (0, 1, 2, 4, 6, 8, 9, 10, 11, 12, 14, 20):
        hogs = []
        try:
            while True:
                hogs.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for _ in range(free):
            os.close(hogs.pop())
        saver_or_none = None
        try:
            if kind == "blocking":
                holdfast.save(small, folder / "c")
            else:
                saver_or_none = holdfast.Saver(worker=kind)  # type: ignore[arg-type]
                saver_or_none.save(small, folder / "c").wait()
            outcomes.add("saved")
        except holdfast.SaveFailed as error:
            outcomes.add("failed")
            if not isinstance(error, OSError):
                wrong.append(f"{free} free: {error}")
        finally:
            for hog in hogs:
                os.close(hog)
        if saver_or_none is None:
            holdfast.save(small, folder / "next")
        else:
            saver_or_none.save(small, folder / "next").wait()
            saver_or_none.close()
        is_whole(folder / "next", 20, 1.0)
        if descriptors() != before:
            wrong.append(f"{free} free: {before} descriptors before, {descriptors()} after")
        for name in ("c", "next"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return [*wrong, *({"saved", "failed"} - outcomes)]


if __name__ == "__main__":
    trial, where, limit, argument = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if trial == "more":
        print(json.dumps(more_files_than_descriptors(Path(where), int(argument))))
    else:
        print(json.dumps(none_left(Path(where), argument)))
