"""Checkpoints in a repository of a hub: opened, loaded in ranges, cached, converted and copied, by the command too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.cli import app
from holdfast.export.work import ConvertWork
from tests import pool
from tests.servers.hub import TOKEN, Hub

ROWS = 1 << 18


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> dict[str, torch.Tensor]:
    """A private model of two files, 1 and 4 MiB, in a folder of a branch; what it holds."""
    held = {name: torch.rand(ROWS) for name in ("a", "b", "c", "d")} | {"e": torch.rand(ROWS)}
    holdfast.save({"model": held}, tmp_path / "saved")
    extras = {"config.json": b"{}"}
    holdfast.convert(tmp_path / "saved", tmp_path / "hf", to="huggingface", max_shard_bytes=16 * ROWS, extras=extras)
    files = {f"deep/{file.name}": file.read_bytes() for file in (tmp_path / "hf").iterdir()}
    hub.make("me/model", {"README.md": b"me"}, private=True).push({**files}, branch="v1")
    return held


def options(hub: Hub) -> dict[str, Any]:
    return {"endpoint_url": hub.url, "token": TOKEN}


def bytes_of_ranges(hub: Hub) -> int:
    """What was asked of the second host since the last look."""
    asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", one.range) for one in hub.asked if one.host == "second"]
    hub.asked.clear()
    return sum(int(range_[2]) + 1 - int(range_[1]) for range_ in asked if range_)


def test_it_reads_what_it_needs_and_no_more(hub: Hub, model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    place = holdfast.storage.at("hf://me/model@v1/deep", options(hub))
    opened = holdfast.open(place)
    assert opened.format == "Hugging Face" and {*opened.tensors} == {f"model/{name}" for name in model}
    assert opened.attachments == {"config.json": 2} and opened.attachment("config.json") == b"{}"
    assert bytes_of_ranges(hub) <= 2 * (256 << 10) + 8192, "the first and the last 128 KiB of each file"
    assert torch.equal(opened.read("model/c"), model["c"])
    assert bytes_of_ranges(hub) == 4 * ROWS
    assert torch.equal(opened.read("model/c", [(1000, 2000)]), model["c"][1000:2000])
    assert bytes_of_ranges(hub) <= 128 << 10
    for _ in range(2):
        into = {"model": {name: torch.zeros(ROWS) for name in model}}
        assert holdfast.load(place, into, cache=tmp_path / "cache").bytes_needed == 20 * ROWS
        assert all(torch.equal(into["model"][name], model[name]) for name in model)
        fetched = bytes_of_ranges(hub)
    assert fetched <= 2 * (256 << 10), "what another opening of the same commit asks for again"


@pytest.mark.slow
def test_the_command(
    hub: Hub, model: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run(*arguments: object) -> str:
        code = app.run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    url = "hf://me/model@v1/deep"
    code = app.run(["show", url])
    shown = capsys.readouterr().err
    assert code != 0 and "log in" in shown and "HF_TOKEN" in shown and "Traceback" not in shown
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "Hugging Face" in run("show", url) and "deep" in run("ls", "hf://me/model@v1")
    assert json.loads(run("verify", url, "--json"))
    doctor = json.loads(run("doctor", url, "--json"))
    assert TOKEN not in str(doctor) and "from HF_TOKEN" in str(doctor)
    run("convert", url, tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["model"]["b"], model["b"])
    run("convert", url, tmp_path / "ours")
    hub.make("me/ours", {f"step/{path}": (tmp_path / "ours" / path).read_bytes() for path in _below(tmp_path / "ours")})
    run("copy", "hf://me/ours/step", tmp_path / "copied")
    assert holdfast.open(tmp_path / "copied").verify().unverified == 0
    assert holdfast.open("hf://me/ours/step", cache=tmp_path / "cache").verify().unverified == 0
    assert run("diff", "hf://me/ours/step", tmp_path / "copied") is not None
    assert {one.token for one in hub.asked} == {"", TOKEN}


def _below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def load_on(commits: list[str], given: dict[str, Any]) -> str:
    place = holdfast.storage.at("hf://me/model", given)
    place.store.store._at = commits[dist.get_rank()], 0.0  # type: ignore[attr-defined]
    into = {"model": {"x": torch.zeros(4)}}
    try:
        holdfast.load(place, into)
    except holdfast.errors.Mismatch as error:
        assert not into["model"]["x"].any()
        return str(error)
    return str(into["model"]["x"].tolist())


def test_ranks_never_read_two_commits(hub: Hub, tmp_path: Path) -> None:
    made, commits = hub.make("me/model"), []
    for value in (1.0, 2.0):
        holdfast.save({"model": {"x": torch.full((4,), value)}}, tmp_path / str(value))
        holdfast.convert(tmp_path / str(value), tmp_path / f"hf{value}", to="huggingface")
        data = (tmp_path / f"hf{value}" / "model.safetensors").read_bytes()
        commits.append(made.push({"model.safetensors": data}))
    assert pool.run(2, load_on, [commits[1]] * 2, options(hub)) == ["[2.0, 2.0, 2.0, 2.0]"] * 2
    for text in pool.run(2, load_on, commits, options(hub)):
        assert "somebody pushed" in text and all(commit in text for commit in commits)


def test_a_conversion_that_broke_off_does_not_go_on_with_another_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hub.make("me/model")
    for value in (1.0, 2.0):
        holdfast.save({"model": {"x": torch.full((4,), value)}}, tmp_path / str(value))
        holdfast.convert(tmp_path / str(value), tmp_path / f"hf{value}", to="huggingface")
    made.push({"model.safetensors": (tmp_path / "hf1.0" / "model.safetensors").read_bytes()})
    with monkeypatch.context() as broken:
        broken.setattr(ConvertWork, "finish", lambda self, notes: int("no number"))
        with pytest.raises(holdfast.HoldfastError, match="no number"):
            holdfast.convert("hf://me/model", tmp_path / "ours")
    assert (tmp_path / "ours.partial").is_dir()
    made.push({"model.safetensors": (tmp_path / "hf2.0" / "model.safetensors").read_bytes()})
    assert not holdfast.convert("hf://me/model", tmp_path / "ours").bytes_resumed
    assert holdfast.open(tmp_path / "ours").read("model/x").tolist() == [2.0] * 4
