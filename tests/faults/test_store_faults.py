"""A store that fails in every way at every request of every story: a whole checkpoint, or a clear error and nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from tests.marks import every
from tests.patience import wait_until
from tests.servers import Server
from tests.servers.faults import Fault
from tests.servers.fixtures import ceph
from tests.servers.moto import forget
from tests.stores import IMPATIENT, PART, Bucket, bucket_of, empty_like, is_same, is_whole, kind, small_parts, state_of

__all__ = ["ceph"]

GUARD = 240.0
"""Seconds after which a story is taken to hang: far more than any of them needs."""

PATIENT, SHORT = 120.0, 1.5
"""Deadlines: for what must come to a good end, and for what cannot."""

ONCE = {
    "reset": Fault("reset"),
    "reset_after": Fault("reset_after"),
    "reset_upload": Fault("reset_upload"),
    "reset_body": Fault("reset_body"),
    "truncate": Fault("truncate"),
    "stall": Fault("stall"),
    "stall_body": Fault("stall_body"),
    "slow_body": Fault("slow_body", rate=20_000_000),
    "500": Fault("status", status=500),
    "503": Fault("status", status=503),
    "429": Fault("status", status=429, retry_after=1),
    "409": Fault("status", status=409),
    "403": Fault("status", status=403, code="ExpiredToken"),
    "down": Fault("down", seconds=0.5),
    "flip": Fault("flip"),
    "flip_upload": Fault("flip_upload"),
}
"""What happens to one request."""

MUST_PASS = ("reset", "reset_after", "reset_upload", "reset_body", "truncate", "stall", "stall_body", "slow_body")
MUST_PASS += ("500", "503", "429", "down")
"""After one of these every story comes to a good end: another attempt helps."""

NEW, OLD = state_of(7, rows=9000), state_of(5, rows=9000)
"""Of 2.3 MB a file: three parts."""


@pytest.fixture(scope="module")
def moto() -> Iterator[Server]:
    """S3 that checks no signatures, and takes small parts."""
    yield from small_parts()


class Story(NamedTuple):
    """``before`` prepares, past the proxy; ``act`` is what meets the faults; ``made`` is where it leaves a checkpoint.

    ``act`` returns a state that must be NEW, or nothing.
    """

    act: Callable[[Bucket, float, Path], dict[str, Any] | None]
    before: Callable[[Bucket], None] = lambda bucket: None
    made: str | None = None


def _save(bucket: Bucket, deadline: float, folder: Path) -> None:
    holdfast.save(NEW, bucket.at("made"), deadline=deadline)


def _save_in_parts(bucket: Bucket, deadline: float, folder: Path) -> None:
    holdfast.save(NEW, bucket.at("made", {"part_size": PART}), deadline=deadline)


def _save_in_background(bucket: Bucket, deadline: float, folder: Path) -> None:
    with holdfast.Saver(worker="process", deadline=deadline) as saver:
        saver.save(NEW, bucket.at("made"), files={"note.txt": b"kept"}).wait()


def _saved(bucket: Bucket) -> None:
    holdfast.save(NEW, bucket.direct("there"))


def _load(bucket: Bucket, deadline: float, folder: Path) -> dict[str, Any]:
    into = empty_like(NEW)
    holdfast.load(bucket.at("there"), into, deadline=deadline)
    return into


def _load_through_cache(bucket: Bucket, deadline: float, folder: Path) -> dict[str, Any]:
    into = empty_like(NEW)
    holdfast.load(bucket.at("there"), into, deadline=deadline, cache=folder / bucket.name / "cache")
    return into


def _verify(bucket: Bucket, deadline: float, folder: Path) -> dict[str, Any]:
    checkpoint = holdfast.open(bucket.at("there", {"retry_timeout": min(deadline / 5, 10.0)}))
    checkpoint.verify()
    return checkpoint.state_dict()


def _saved_steps(bucket: Bucket) -> None:
    for state in (OLD, NEW):
        holdfast.save(state, bucket.direct(f"run/step-{state['step']:09d}"))


def _restore(bucket: Bucket, deadline: float, folder: Path) -> dict[str, Any]:
    into = empty_like(NEW)
    root = bucket.at("run", {"retry_timeout": min(deadline / 5, 10.0)})
    with holdfast.CheckpointManager(root, every=1, worker="none", deadline=deadline) as manager:
        assert manager.restore(into) is not None, "there are steps, and they may not be taken for none"
    return into


def _copy(bucket: Bucket, deadline: float, folder: Path) -> None:
    holdfast.copy(bucket.at("there"), bucket.at("made"), deadline=deadline)


STORIES = {
    "save": Story(_save, made="made"),
    "save in parts": Story(_save_in_parts, made="made"),
    "save in the background": Story(_save_in_background, made="made"),
    "load": Story(_load, _saved),
    "load through a cache": Story(_load_through_cache, _saved),
    "verify": Story(_verify, _saved),
    "restore": Story(_restore, _saved_steps),
    "copy": Story(_copy, _saved, made="made"),
}


def asked_by(story: Story, moto: Server, folder: Path) -> list[str]:
    """What a story asks of a store that is well, request by request."""
    with bucket_of(moto) as bucket:
        story.before(bucket)
        came = story.act(bucket, PATIENT, folder)
        assert came is None or is_same(came, NEW)
        if story.made is not None:
            is_whole(bucket.direct(story.made), NEW)
        return [kind(request) for request in bucket.proxy.requests()]


def run(story: Story, moto: Server, fault: Fault, deadline: float, folder: Path, *, must_pass: bool) -> str:
    """What is wrong after one story with one fault; nothing if all is as it should be."""
    with bucket_of(moto, timeouts=IMPATIENT) as bucket:
        story.before(bucket)
        bucket.proxy.add(fault)
        began = time.monotonic()
        try:
            came = story.act(bucket, deadline, folder)
        except holdfast.HoldfastError as error:
            failed: holdfast.HoldfastError | None = error
        else:
            failed = None
        if time.monotonic() - began > GUARD:
            return f"it took {time.monotonic() - began:.0f} s"
        fired = bucket.proxy.fired() > 0
        # An upload of which only the server knows is nobody's to end: buckets have rules for these.
        begun = [request for request in bucket.proxy.requests() if kind(request) == "initiate"]
        lost = sum(bool(request.fault) or not request.status for request in begun)
        orphans = max(lost, len(begun) - len({request.path for request in begun}))
        bucket.proxy.clear()
        if failed is not None:
            if must_pass:
                return f"failed: {type(failed).__name__}: {failed}"
            if len(str(failed)) < 20 or ("s3://" not in str(failed) and "writer process" not in str(failed)):
                return f"failed without saying what: {failed!r}"
        elif came is not None and not is_same(came, NEW):
            return "another state came back" + (" (of the step before)" if is_same(came, OLD) else "")
        if story.made is None:
            return ""
        flipped = fault.kind == "flip_upload" and fired
        wrong = after_a_save(bucket, story.made, failed, flipped=flipped)
        if not wrong and fault.times == 1 and not flipped and story.act is not _copy:
            wrong = leavings(bucket, story.made, failed, orphans)
        return wrong


def after_a_save(bucket: Bucket, made: str, failed: holdfast.HoldfastError | None, *, flipped: bool) -> str:
    """What is wrong with what a save (or copy) has left."""
    files = bucket.files(made)
    if "manifest.json" in files:
        try:
            is_whole(bucket.direct(made), NEW)
        except holdfast.errors.Damaged as error:
            return "" if flipped and failed is None else f"a manifest stands, and the checkpoint is damaged: {error}"
        told = failed is None or "may be committed" in str(failed) or not isinstance(failed, holdfast.SaveFailed)
        return "" if told else f"it is committed, and was told: {failed}"
    if failed is None:
        return f"it was told to be saved, and there is no manifest: {files}"
    return ""


def leavings(bucket: Bucket, made: str, failed: holdfast.HoldfastError | None, orphans: int) -> str:
    """What a save has left that could have deleted it."""
    named = {"manifest.json"}
    if failed is None:
        record = holdfast.open(bucket.direct(made)).manifest
        named |= {file.path for file in record.data_files} | {path for path, _, _ in record.attachments}
    left = [path for path in bucket.files(made) if path not in named and ".holdfast-probe-" not in path]
    # A part of a committed save, which says that a rank had finished, is swept later.
    left = [path for path in left if failed is not None or not path.startswith("parts/")]
    uploads = bucket.uploads()
    return f"it left {left} and {uploads} uploads" if left or uploads > orphans else ""


def diagonal(asked: list[str]) -> list[tuple[str, int]]:
    """Every fault at one request, every kind of request with some faults."""
    firsts = [asked.index(one) for one in dict.fromkeys(asked)]
    names = list(ONCE)
    count = max(len(names), 2 * len(firsts))
    cases = {(names[i % len(names)], firsts[(i + i // len(names)) % len(firsts)] + 1) for i in range(count)}
    # What matters most: the data, the commit, and what is read of either, with each way to spoil bytes.
    for name in ("flip", "flip_upload", "reset_after", "403"):
        for what in ("put data", "part", "put manifest", "get manifest", "get data"):
            if what in asked:
                cases.add((name, asked.index(what) + 1))
    return sorted(cases)


def at(fault: Fault, nth: int, times: int | None = 1) -> Fault:
    return Fault(**{**vars(fault), "nth": nth, "times": times})


def report(story: str, asked: list[str], wrong: dict[tuple[str, int], str]) -> None:
    assert not wrong, "\n".join(
        f"{story}, {name} at request {n} ({asked[n - 1] if n <= len(asked) else 'a late one'}): {text}"
        for (name, n), text in wrong.items()
    )


def once(story: str, cases: list[tuple[str, int]], asked: list[str], moto: Server, folder: Path) -> None:
    wrong = {}
    for name, n in cases:
        text = run(STORIES[story], moto, at(ONCE[name], n), PATIENT, folder, must_pass=name in MUST_PASS)
        forget(moto)
        if text:
            wrong[name, n] = text
    report(story, asked, wrong)


QUICK = ("save",)


@pytest.mark.parametrize(
    "story", [pytest.param(story, marks=() if story in QUICK else pytest.mark.slow) for story in STORIES]
)
def test_one_request_goes_wrong(story: str, moto: Server, tmp_path: Path) -> None:
    asked = asked_by(STORIES[story], moto, tmp_path)
    once(story, every(4, diagonal(asked)), asked, moto, tmp_path)


LASTING = {name: ONCE[name] for name in ("reset", "reset_after", "stall", "stall_body", "503", "403", "flip")}
LASTING["down"] = Fault("down", seconds=600.0)


def for_good(story: str, cases: list[tuple[str, int]], asked: list[str], moto: Server, folder: Path) -> None:
    wrong = {}
    for name, n in cases:
        text = run(STORIES[story], moto, at(LASTING[name], n, None), SHORT, folder, must_pass=False)
        forget(moto)
        if text:
            wrong[name, n] = text
    report(story, asked, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("story", [pytest.param("save in the background", marks=pytest.mark.slow), "load"])
def test_all_goes_wrong_from_one_request_on(story: str, moto: Server, tmp_path: Path) -> None:
    asked = asked_by(STORIES[story], moto, tmp_path)
    last = "put manifest" if "put manifest" in asked else "get manifest"
    data = next(one for one in ("put data", "get data") if one in asked)
    cases = [("reset_after", last), ("403", last), ("down", data), ("503", "list"), ("flip", "get data")]
    for_good(story, [(name, asked.index(what) + 1) for name, what in cases if what in asked], asked, moto, tmp_path)


# What happens after a save was given up


@pytest.mark.slow
@pytest.mark.parametrize("kind_of_save", ["save", "save in the background"])
def test_a_commit_that_lands_after_the_save_was_given_up_is_whole(
    kind_of_save: str, moto: Server, tmp_path: Path
) -> None:
    with bucket_of(moto, timeouts=IMPATIENT) as bucket:
        bucket.proxy.add(Fault("status", status=503, times=None, path="manifest.json", method="PUT"))
        with pytest.raises(holdfast.SaveFailed, match="It may be committed all the same: holdfast.open") as caught:
            STORIES[kind_of_save].act(bucket, 2 * SHORT, tmp_path)
        assert isinstance(caught.value, holdfast.errors.StorageError) and not caught.value.settled
        bucket.proxy.clear()
        # The client has been left alone with the request, and goes on trying: the files must still be there.
        wait_until(lambda: "manifest.json" in bucket.files("made"))
        is_whole(bucket.direct("made"), NEW)


@pytest.mark.slow
def test_an_overwrite_that_is_not_answered_loses_neither_checkpoint(moto: Server) -> None:
    with bucket_of(moto, timeouts=IMPATIENT) as bucket:
        holdfast.save(OLD, bucket.direct("made"))
        bucket.proxy.add(Fault("reset_after", times=None, path="manifest.json", method="PUT"))
        # The first is for what the old one names; those after it would tell that the new one stands.
        bucket.proxy.add(Fault("reset", times=None, nth=2, path="manifest.json", method="GET"))
        with pytest.raises(holdfast.SaveFailed, match="may be committed"):
            holdfast.save(NEW, bucket.at("made"), overwrite=True, deadline=SHORT)
        bucket.proxy.clear()
        checkpoint = holdfast.open(bucket.direct("made"))
        checkpoint.verify()
        is_whole(bucket.direct("made"), NEW if checkpoint.step == NEW["step"] else OLD)


# A server that checks what it is sent


@pytest.mark.parametrize("more", [{}, {"part_size": 5 << 20}], ids=["one request", "parts"])
def test_a_bit_that_flips_on_the_way_to_a_server_that_checks(more: dict[str, Any], ceph: Server) -> None:
    """Ceph knows from the signature what it should have got: it refuses, and the save ends well or says so."""
    state = state_of(2, rows=30_000)
    for what in ("safetensors", "manifest.json"):
        with bucket_of(ceph) as bucket:
            bucket.proxy.add(Fault("flip_upload", method="PUT", path=what))
            try:
                holdfast.save(state, bucket.at("made", more), deadline=PATIENT)
            except holdfast.SaveFailed as error:
                assert "the bytes changed on their way" in str(error)
                assert bucket.files("made") == {}
            else:
                is_whole(bucket.direct("made"), state)
            assert bucket.proxy.fired() == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("story", STORIES)
def test_each_request_goes_wrong_in_each_way(story: str, moto: Server, tmp_path: Path) -> None:
    asked = asked_by(STORIES[story], moto, tmp_path)
    once(story, [(name, n + 1) for name in ONCE for n in range(len(asked))], asked, moto, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("story", STORIES)
def test_all_goes_wrong_from_each_request_on(story: str, moto: Server, tmp_path: Path) -> None:
    asked = asked_by(STORIES[story], moto, tmp_path)
    for_good(story, [(name, n + 1) for name in LASTING for n in range(len(asked))], asked, moto, tmp_path)
