"""Pushes to a hub with huggingface_hub's own client: one commit, what it replaces, and what errors say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StorageError, Unsupported
from tests.servers.hub import TOKEN, Hub

pytest.importorskip("huggingface_hub")


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody who may push, with a temporary folder of their own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    state = {"model": {"a": torch.arange(3000.0), "b": torch.ones(2, 2)}, "optimizer": {"m": torch.ones(5)}, "step": 7}
    holdfast.save(state, tmp_path / "step-7")
    return tmp_path / "step-7"


def test_a_conversion_is_one_commit_and_reads_back(hub: Hub, step: Path) -> None:
    done = holdfast.convert(
        step, "hf://me/model", to="huggingface", extras={"config.json": b"{}"}, max_shard_bytes=9000
    )
    made = hub.at("me/model")
    assert [*made.commits[1].files] == [".gitattributes"][:0] + sorted(made.commits[1].files) and len(made.commits) == 2
    assert {*made.files} == {
        ".gitattributes", "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    nbytes = sum(map(len, made.files.values())) - len(made.files[".gitattributes"])
    assert str(done.path) == "hf://me/model" and done.nbytes == nbytes
    into = {"model": {"a": torch.zeros(3000), "b": torch.zeros(2, 2)}}
    holdfast.load("hf://me/model", into)
    assert torch.equal(into["model"]["a"], torch.arange(3000.0)) and into["model"]["b"].sum() == 4
    assert not made.private


def test_overwriting_takes_away_the_older_weights_alone(hub: Hub, step: Path) -> None:
    hub.make("me/model", {
        "README.md": b"mine", "model-00001-of-00003.safetensors": b"old", "model.safetensors.index.json": b"{}",
        "model.gguf": b"mine", "onnx/model.onnx": b"mine", "sub/model.safetensors": b"mine",
    })  # fmt: skip
    with pytest.raises(StorageError, match=r"hf://me/model holds .* and more.*overwrite=True"):
        holdfast.convert(step, "hf://me/model", to="huggingface")
    holdfast.convert(step, "hf://me/model", to="huggingface", overwrite=True)
    assert {*hub.at("me/model").files} == {
        ".gitattributes", "README.md", "model.gguf", "onnx/model.onnx", "sub/model.safetensors", "model.safetensors",
    }  # fmt: skip
    assert len(hub.at("me/model").commits) == 3


@pytest.mark.parametrize("to", ["torch", "dcp", "holdfast"])
def test_other_formats_into_a_folder_of_a_branch(hub: Hub, step: Path, to: Any) -> None:
    name = "one.pt" if to == "torch" else "folder"
    holdfast.convert(step, f"hf://me/model@dev/{name}?private=true", to=to)
    made = hub.at("me/model")
    assert {*made.branches} == {"main", "dev"} and {*made.files} == {".gitattributes"} and made.private
    opened = holdfast.open(f"hf://me/model@dev/{name}")
    assert torch.equal(opened.read("model/a"), torch.arange(3000.0))


@pytest.mark.slow
def test_a_copy_of_a_step_and_of_a_run(hub: Hub, step: Path, tmp_path: Path) -> None:
    copied = holdfast.copy(step, "hf://me/run/step-7")
    assert copied.committed and copied.target == "hf://me/run/step-7" and len(hub.at("me/run").commits) == 2
    again = holdfast.open("hf://me/run/step-7")
    assert again.step == 7 and again.verify().unverified == 0
    assert not holdfast.copy(step, "hf://me/run/step-7").committed and len(hub.at("me/run").commits) == 2
    older = {*hub.at("me/run").files}
    holdfast.save({"x": torch.ones(3), "step": 8}, tmp_path / "step-8")
    with pytest.raises(StorageError, match="overwrite=True"):
        holdfast.copy(tmp_path / "step-8", "hf://me/run/step-7")
    holdfast.copy(tmp_path / "step-8", "hf://me/run/step-7", overwrite=True)
    assert holdfast.open("hf://me/run/step-7").verify().unverified == 0
    assert {*hub.at("me/run").files} & older == {".gitattributes", "step-7/manifest.json"}
    (tmp_path / "run").mkdir()
    for name in ("step-7", "step-8"):
        (tmp_path / name).rename(tmp_path / "run" / name)
    assert {*holdfast.copy(tmp_path / "run", "hf://me/all").steps} == {"step-7", "step-8"}
    assert len(hub.at("me/all").commits) == 2 and holdfast.open("hf://me/all/step-8").step == 8
    assert holdfast.copy("hf://me/all", tmp_path / "back").steps.keys() == {"step-7", "step-8"}


def test_a_state_in_memory(hub: Hub, step: Path) -> None:
    live = {"model": torch.nn.Linear(300, 40)}
    holdfast.convert(live, "hf://me/live", to="huggingface", extras={"config.json": b"{}"})
    assert torch.equal(holdfast.open("hf://me/live").read("model/weight"), live["model"].weight)
    assert len(hub.at("me/live").commits) == 2
    with pytest.raises(Unsupported, match="name it in the repository, as hf://me/live/model.pt"):
        holdfast.convert(step, "hf://me/live", to="torch", overwrite=True)


def test_nothing_is_made_for_a_source_that_is_no_checkpoint(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.copy(tmp_path / "typo", "hf://me/model")
    assert not hub.repositories


def test_somebody_else_pushes_meanwhile(hub: Hub, step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.storage.hub import push as module

    made, push = hub.make("me/model"), module.push

    def late(*args: Any, **named: Any) -> str:
        made.push({"README.md": b"theirs"})
        return push(*args, **named)

    monkeypatch.setattr(module, "push", late)
    with pytest.raises(StorageError, match="somebody pushed .* meanwhile, and nothing was changed"):
        holdfast.convert(step, "hf://me/model", to="huggingface")
    assert {*made.files} == {".gitattributes", "README.md"}


def test_who_may_not_push(hub: Hub, step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def push(target: str, text: str, kind: type[Exception] = StorageError) -> None:
        with pytest.raises(kind, match=text) as caught:
            holdfast.convert(step, target, to="huggingface")
        assert TOKEN not in str(caught.value)

    hub.make("me/theirs")
    push("hf://forbidden/model", "token from HF_TOKEN may not do that.*namespace")
    push(f"hf://me/theirs@{'a' * 40}", "names a commit", Unsupported)
    hub.accepted.add("hf_reader")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    push("hf://me/theirs", "HF_TOKEN may not do that")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", "/nowhere")
    push("hf://me/model", "takes a token that may write: log in .*HF_TOKEN")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    push("hf://me/model", r'needs huggingface_hub: pip install "holdfast-torch\[hub\]"', Unsupported)


def test_saves_are_refused_before_anything_is_done(hub: Hub, tmp_path: Path) -> None:
    hub.make("me/model")
    text = r"nothing can be saved to hf://me/model/step-1: in a repository .* holdfast.copy\(step, 'hf://me/model'\)"
    with pytest.raises(holdfast.SaveFailed, match=text):
        holdfast.save({"x": torch.ones(1)}, "hf://me/model/step-1")
    with holdfast.Saver(worker="thread") as saver, pytest.raises(holdfast.SaveFailed, match=text):
        saver.save({"x": torch.ones(1)}, "hf://me/model/step-1").wait()
    with pytest.raises(Unsupported, match="cannot be the root of a manager"):
        holdfast.CheckpointManager("hf://me/run", every=1)
    with pytest.raises(StorageError, match="cannot be written or deleted"):
        (holdfast.storage.at("hf://me/model") / "x").write_small(b"x")
    assert not hub.asked, "no request was sent"
    with pytest.raises(holdfast.SaveFailed, match="a web server can be read only"):
        holdfast.save({"x": torch.ones(1)}, f"{hub.url}/step-1")
    assert json.dumps([*hub.at("me/model").files]) == '[".gitattributes"]'
