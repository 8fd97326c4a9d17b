"""What a Trainer with push_to_hub pushes at its saves: the same from steps of holdfast as from its own checkpoints."""

import os
import subprocess
import sys

import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.local.local_place import LocalPlace
from holdfast.trainers import huggingface_push
from holdfast.trainers.huggingface import HoldfastCallback
from holdfast.trainers.huggingface_push import refuse_to_push_steps
from tests.servers.hub import Commit, Hub
from tests.trainers import hf_runs

MODEL = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}


def pushed(folder, strategy, attached="holdfast", *, pace="goes on"):
    """The commits of a training, and what it left in its output folder."""
    with Hub() as hub:
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.trainers.pushing", str(folder), attached, strategy, pace],
            env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert [*hub.repositories] == ["models/somebody/mine"]
        left = next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("left"))
        return hub, set(left)


def commits_of(hub: Hub) -> list[Commit]:
    """But for the hub's own."""
    return hub.at("somebody/mine").commits[1:]


@pytest.mark.slow
def test_every_save_pushes_the_model_as_trainer_does(tmp_path):
    hub, left = pushed(tmp_path / "ours", "every_save", pace="waits")
    ours, theirs = commits_of(hub), commits_of(pushed(tmp_path / "theirs", "every_save", "trainer", pace="waits")[0])
    assert [commit.summary for commit in ours] == [f"Training in progress, step {step}" for step in (2, 4, 6)]
    assert [commit.summary for commit in theirs] == [commit.summary for commit in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert set(one.files) == set(other.files) == MODEL
        assert one.files["model.safetensors"] == other.files["model.safetensors"]
    assert left == MODEL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("checkpoint", {"last-checkpoint": 6}), ("all_checkpoints", {f"step-{step:09d}": step for step in (2, 4, 6)})],
)
def test_a_step_is_pushed_whole_and_alone(tmp_path, strategy, folders):
    hub, left = pushed(tmp_path, strategy)
    expected = [f"Training in progress, step {step}{more}" for step in (2, 4, 6) for more in ("", ", checkpoint")]
    assert [commit.summary for commit in commits_of(hub)] == expected and left == MODEL
    files = hub.at("somebody/mine").files
    assert {path for path in files if "/" not in path} == MODEL | {".gitattributes"}
    for path, data in files.items():
        (tmp_path / "hub" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / path).write_bytes(data)
    for folder, step in folders.items():
        saved = holdfast.open(tmp_path / "hub" / folder)
        saved.verify()
        assert saved.step == step
        named = {file.path for file in saved.manifest.data_files} | {path for path, *_ in saved.manifest.attachments}
        pushed_there = {path.partition("/")[2] for path in files if path.startswith(f"{folder}/")}
        assert pushed_there == named | {"manifest.json"}
    # What was pushed is a step to go on from.
    trainer = hf_runs.trainer_of(tmp_path / "again", num_train_epochs=2)
    callback = HoldfastCallback(tmp_path / "again", every=6, worker="thread", deadline=240).attach(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "hub" / max(folders)))
    assert callback.restored.step == 6 and callback.manager.steps() == [12]


def test_a_step_that_is_not_pushed_is_logged(tmp_path, monkeypatch, caplog):
    def push(files, place, **_):
        raise StorageError("the hub is away")

    monkeypatch.setattr(huggingface_push, "push", push)
    (tmp_path / "step-000000002").mkdir()
    with pytest.raises(StorageError):
        huggingface_push._push_step(tmp_path / "step-000000002", lambda: LocalPlace(tmp_path), "message")
    assert caplog.messages == ["step-000000002 is not pushed to the Hub: the hub is away"]


@pytest.mark.slow
def test_nothing_is_pushed_while_training_if_only_the_end_is(tmp_path):
    hub, left = pushed(tmp_path, "end")
    assert commits_of(hub) == [] and left == set()


def test_steps_are_not_pushed_with_the_output_folder(tmp_path):
    args = hf_runs.trainer_of(tmp_path).args
    args.push_to_hub = True
    for root in (tmp_path, tmp_path / "steps" / "run"):
        with pytest.raises(ValueError, match="whose name begins with an underscore"):
            refuse_to_push_steps(args, [root])
    refuse_to_push_steps(args, [tmp_path.parent / "elsewhere", tmp_path / "_steps" / "run"])
    args.push_to_hub = False
    refuse_to_push_steps(args, [tmp_path])
