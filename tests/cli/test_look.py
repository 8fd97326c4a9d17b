"""The commands that look: what they print, what they end with, on every format and in a store."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import app as application
from holdfast.cli.errors import Code
from holdfast.storage.local.local_place import LocalPlace
from tests.citing import save_on, state_of
from tests.damaging import contents_of, flip
from tests.formats.truth import GOLDEN
from tests.servers import Server
from tests.storage.cloud.clouds import options_of

NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
HOSTILE = "a[b]%25/\x1b[31m[bold]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def running(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = application.run([*map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return running


def state(step: int) -> dict[str, Any]:
    torch.manual_seed(1)
    layers = {f"layers.{i}.{w}": torch.randn(4, 6) for i in range(8) for w in ("wq", "wo")}
    embed = torch.randn(10, 4)
    embed[0, 0] = float("nan")
    return {
        "model": {"embed": embed + step, "head": embed + step, **layers, HOSTILE: torch.ones(step)},
        "optimizer": {"m": torch.zeros(5, dtype=torch.bfloat16)},
        "step": step, "lr": 0.125, "words": ["a" * 200], "rng": holdfast.PerRank({"seed": step}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, of which the second differs."""
    root = LocalPlace(tmp_path_factory.mktemp("run"))
    for step in (3, 4):
        holdfast.save(state(step), root / f"step-{step}", step=step, files={"config.yaml": b"x" * 10})
    return root


def test_ls(run: Any, saved: Path, tmp_path: Path) -> None:
    code, out, err = run("ls", saved)
    assert code == Code.FINE and not err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["step", "name", "age", "bytes", "ranks", "health"]
    assert [line[:2] + line[-1:] for line in lines[1:3]] == [["3", "step-3", "whole"], ["4", "step-4", "whole"]]
    assert out.splitlines()[3:] == ["whole: every file has its size; holdfast verify reads the bytes"]
    assert "whole: every file has its size and header; " in run("ls", saved, "--headers")[1]
    assert "whole: every file has its size; " in run("ls", saved.parent)[1]
    told = json.loads(run("ls", saved, "--json")[1])
    assert [step["step"] for step in told["checkpoints"]] == [3, 4] and told["checkpoints"][0]["nbytes"] > 1000
    code, _, err = run("ls", tmp_path / "nowhere")
    assert code == Code.NOT_A_CHECKPOINT and "nothing at" in err


def test_ls_marks_the_steps_that_training_left_behind(run: Any, tmp_path: Path) -> None:
    for first in (None, 10):
        with holdfast.CheckpointManager(tmp_path, every=10, keep=holdfast.Keep(last=9), worker="thread") as manager:
            if first is not None:
                manager.restore({"w": torch.zeros(2), "step": 0}, step=first)
            for step in (20,) if first else (10, 20, 30):
                manager.step(step, {"w": torch.ones(2), "step": step})
    code, out, _ = run("ls", tmp_path)
    assert code == 0 and [line.split()[-1] for line in out.splitlines()[1:3]] == ["whole", "whole"]
    assert out.splitlines()[3].endswith("left behind") and out.splitlines()[5].startswith("left behind: training went")
    assert not any(line.endswith(" ") for line in out.splitlines())
    steps = json.loads(run("ls", tmp_path, "--json")[1])["checkpoints"]
    assert [step["health"] for step in steps] == ["whole", "whole", "left behind"]


def test_ls_says_what_is_wrong(run: Any, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "step-3" / "manifest.json").unlink()
    flip(next((tmp_path / "run" / "step-4" / "model").iterdir()), 100)
    code, out, _ = run("ls", tmp_path / "run")
    assert code == Code.FINE and "unfinished" in out and "whole" in out and "holdfast doctor says" in out
    assert "damaged" in run("ls", tmp_path / "run", "--headers")[1]


def test_show(run: Any, saved: Path) -> None:
    code, out, err = run("show", saved / "step-3")
    assert code == Code.FINE and not err
    assert "layers.{0-7}." in out and "×8" in out and "float32 [4, 6]" in out and "whole, rank 0" in out
    assert "step 3" in out and "by 1 rank" in out and "config.yaml" in out and "rng" in out and "0.125" in out
    assert "aaaa…" in out and "a" * 100 not in out and "\x1b" not in out
    assert out.count("\n") < 35
    assert "a" * 200 in run("show", saved / "step-3", "--values")[1]
    assert "wq" not in run("show", saved / "step-3", "--depth", 1)[1]


def test_show_tensors(run: Any, saved: Path) -> None:
    code, out, _ = run("show", saved / "step-3", "--tensors", "*embed", "--stats")
    assert code == Code.FINE and len(out.splitlines()) == 6 and out.splitlines()[-1].split()[-3:] == ["1", "0", "0"]
    told = json.loads(run("show", saved / "step-3", "--json", "--stats", "--layout")[1])
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    truth = state(3)["model"]["layers.3.wo"].double()
    assert by_name["model/layers.3.wo"]["stats"]["mean"] == pytest.approx(float(truth.mean()))
    assert by_name["model/embed"]["stats"]["nan"] == 1 and by_name["model/layers.0.wq"]["boxes"][0][0] == "[0:4,0:6]"
    assert told["values"]["step"] == 3 and told["per_rank"] == ["rng"] and told["attachments"] == {"config.yaml": 10}
    assert any(name.endswith("[bold]") or "bold" in name for name in by_name)
    code, _, err = run("show", saved / "step-3", "--tensors", "modell*")
    assert code == Code.MISMATCH and "no tensor that fits 'modell*' (did you mean model?)" in err


def test_names_move_no_cursor_and_stay_what_they_are(run: Any, tmp_path: Path) -> None:
    name = "a[b/c]\\"
    holdfast.save({"m": {f":on: x[/b]\\{i}": torch.ones(2) for i in range(2)}, "\u202ertl": 1}, tmp_path / name)
    for word, *options in COMMANDS:
        if word != "ls":
            out = run(word, tmp_path / name, *options)[1]
            assert f"{tmp_path / name}" in out or word == "diff"
            assert ":on: x" in out or "--ranks" in options
            assert "\u202e" not in out
    (tmp_path / name).rename(tmp_path / ":on: x\x1b[31m\u202e\n[b]")
    out = run("ls", tmp_path)[1]
    assert ":on: x\\x1b[31m\\u202e\\n[b]" in out


def test_names_that_are_no_text(run: Any, saved: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"step-\xff")
    shutil.copytree(saved / "step-3", odd)
    assert "step-\\udcff" in run("ls", tmp_path)[1]
    assert json.loads(run("ls", tmp_path, "--json")[1])["checkpoints"][0]["name"] == odd.name
    assert json.loads(run("show", odd, "--json")[1])["path"] == str(odd)
    code, _, err = run("show", f"{odd}x", "--json")
    assert code == Code.NOT_A_CHECKPOINT and odd.name in json.loads(err)["error"]["text"]


def test_show_tied(run: Any, tmp_path: Path) -> None:
    w = torch.zeros(3)
    holdfast.save({"m": {"a": w, "b": w}}, tmp_path / "c")
    assert "tied" in run("show", tmp_path / "c")[1] and "m/b = m/a" in run("show", tmp_path / "c", "--tensors", "*")[1]


def test_diff(run: Any, saved: Path) -> None:
    code, out, err = run("diff", saved / "step-3", saved / "step-3")
    assert code == Code.FINE and "the same by their recorded checksums: 24 names" in out and not err
    code, out, _ = run("diff", saved / "step-3", saved / "step-4")
    assert code == Code.DIFFERENT == 1
    assert "1 of another shape, 4 changed" in out and "19 the same, 17 of them by their recorded" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["step", "3", "4"] in lines and any(line[:3] == ["model/embed", *line[1:3]] for line in lines if line)
    told = json.loads(run("diff", saved / "step-3", saved / "step-4", "--json")[1])
    embed = next(d for d in told["differences"] if d["name"] == "model/embed")
    assert embed["largest"] == pytest.approx(1.0, abs=1e-5) and embed["nonfinite"] == 0 and not told["same"]
    assert run("diff", saved / "step-3", saved / "step-4", "--tensors", "*layers*")[0] == Code.FINE
    code, out, _ = run("diff", saved / "step-3", saved / "step-4", "--names-only")
    assert code == Code.DIFFERENT and "changed" not in out and "1 of another shape" in out
    code, _, err = run("diff", saved / "step-3", saved / "step-4", "--tensors", "layer*")
    assert code == Code.MISMATCH and "has a name that fits 'layer*'" in err


def test_diff_claims_no_more_than_it_read(run: Any, tmp_path: Path) -> None:
    for name in "ab":
        holdfast.save({"m": {"w": torch.arange(2000.0)}, "lr": 0.5}, tmp_path / name)
    flip(next((tmp_path / "b" / "m").iterdir()), 5000)
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert code == Code.FINE and "last bit" not in out
    assert out == "the same by their recorded checksums: 2 names (holdfast verify reads the bytes)\n"
    told = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert told["same"] and told["same_by"] == {"bytes": 1, "checksums": 1}
    told = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--names-only", "--json")[1])
    assert told["same_by"] == {"names": 2}
    torch.save({"m": {"w": torch.arange(2000.0)}, "lr": 0.5}, tmp_path / "c.pt")
    assert run("diff", tmp_path / "a", tmp_path / "c.pt")[1] == "the same, to the last bit: 2 names\n"


def test_diff_sorts_by_relative_change(run: Any, tmp_path: Path) -> None:
    big, small = torch.full((9,), 100.0), torch.full((9,), 0.001)
    holdfast.save({"m": {"a": big, "b": small, "c": big}}, tmp_path / "a")
    holdfast.save({"m": {"a": big + 1, "b": small * 2, "c": big + 2}}, tmp_path / "b")
    told = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert [d["name"] for d in told["differences"]] == ["m/b", "m/c", "m/a"]
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b", "--top", 1)
    assert code == 1 and "m/b" in out and "m/c" not in out and "and 2 more" in out


def test_diff_top_counts_tensors(run: Any, tmp_path: Path) -> None:
    values = {f"v{i}": i for i in range(6)}
    tensors = {f"t{i}": torch.full((3,), 100.0) for i in range(6)}
    holdfast.save({"m": tensors, **values, "words": ["a"] * 9}, tmp_path / "a")
    changed = {name: tensor + i for i, (name, tensor) in enumerate(tensors.items())}
    holdfast.save({"m": changed, **dict.fromkeys(values, -1)}, tmp_path / "b")
    out = run("diff", tmp_path / "a", tmp_path / "b", "--top", 2)[1]
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("m/")] == ["m/t5", "m/t4"]
    assert [line.split()[0] for line in lines if line.startswith(("v", "words"))] == ["value", "words/0", "v0"]
    assert "and 8 more" in out
    told = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--top", 2, "--json")[1])
    assert [d["name"] for d in told["differences"]][:2] == ["m/t5", "m/t4"] and len(told["differences"]) == 12


def test_ls_of_a_folder_of_runs(run: Any, tmp_path: Path) -> None:
    for name, last in (("b", 1), ("a", 3)):
        for step in range(1, last + 1):
            holdfast.save({"w": torch.ones(step * 100)}, tmp_path / name / f"step-{step}", step=step)
    (tmp_path / "notes").mkdir()
    with holdfast.CheckpointManager(tmp_path / "fresh", every=9, worker="none", signals=()) as manager:
        manager.step(1, {"step": 1})
    code, out, err = run("ls", tmp_path)
    rows = [line.split() for line in out.splitlines()]
    assert code == Code.FINE and not err and rows[0][:3] == ["run", "steps", "newest"]
    assert [(row[0], row[1], row[2]) for row in rows[1:3]] == [("a", "3", "step-3"), ("b", "1", "step-1")]
    assert rows[3][:2] == ["fresh", "0"] and "no step was saved here yet" in out and rows[4][0] == "whole:"
    assert run("ls", tmp_path, "--sizes")[:2] == (code, out)
    told = json.loads(run("ls", tmp_path, "--json")[1])["runs"]
    assert [one["name"] for one in told] == ["a", "b", "fresh"] and told[0]["newest"]["step"] == 3
    assert told[0]["nbytes"] == sum(
        step["own"] for step in json.loads(run("ls", tmp_path / "a", "--json")[1])["checkpoints"]
    )
    for word in ("show", "verify"):
        code, _, err = run(word, tmp_path)
        assert code == Code.NOT_A_CHECKPOINT and f"holdfast ls {tmp_path} lists them" in err


def test_sizes(run: Any, saved: Path, tmp_path: Path) -> None:
    code, out, _ = run("show", saved / "step-3", "--sizes")
    assert code == Code.FINE and "optimizer" in out and "bfloat16" in out and "layers.{0-7}." in out
    told = json.loads(run("show", saved / "step-3", "--sizes", "--json", "--tensors", "optimizer")[1])
    assert told["tensors"] == 10 and [m["nbytes"] for m in told["modules"]] == [10]
    save_on(state_of(1), tmp_path / "step-1")
    save_on(state_of(2, model=1), tmp_path / "step-2", tmp_path / "step-1")
    code, out, _ = run("ls", tmp_path, "--sizes")
    assert code == Code.FINE and "deleting it frees" in out and "each file once" in out
    assert run("show", tmp_path, "--sizes")[1] == out
    assert run("ls", tmp_path, "--sizes", "--headers")[0] == Code.USAGE
    told = json.loads(run("ls", tmp_path, "--sizes", "--json")[1])
    assert told["steps"][1]["frees"] < told["steps"][1]["nbytes"] and told["steps"][1]["shared"] > 0


def test_sizes_of_what_is_not_there(run: Any, saved: Path, tmp_path: Path) -> None:
    code, out, err = run("show", saved / "step-3", "--sizes", "--tensors", "modle")
    assert code == Code.MISMATCH and not out and "fits 'modle' (did you mean model?)" in err
    assert run("show", saved, "--sizes", "--tensors", "model")[0] == Code.MISMATCH
    shutil.copytree(GOLDEN / "dcp_single" / "ckpt", tmp_path / "step-1")
    assert "the last of 1 steps, step-1" in run("show", tmp_path, "--sizes")[1]


def test_pages_are_called_like_what_they_show(
    run: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    copied = shutil.copytree(saved / "step-3", tmp_path / "run" / "step-3")
    monkeypatch.chdir(copied)
    assert f"{copied}/step-3.html" in run("view", ".")[1] and f"{copied}/run.html" in run("view", "..")[1]


def test_mesh(run: Any, saved: Path) -> None:
    code, out, _ = run("show", saved / "step-3", "--ranks", 4, "--tensors", "model/layers*")
    assert code == Code.FINE and "on fsdp=4 (4 ranks" in out and "each rank, most" in out
    told = json.loads(
        run("show", saved / "step-3", "--mesh", "fsdp=2,tp=2", "--node-size", 2, "--shard", "*wo=1", "--json",
            "--tensors", "model/layers*")[1]
    )  # fmt: skip
    # 8 layers of two of 96 bytes: all are halved by FSDP, and by the rule the second of each by the other axis too.
    assert [rank["needed"] for rank in told["ranks"]] == [8 * (48 + 24)] * 4 and len(told["nodes"]) == 2
    for arguments, code in (
        (("--ranks", 4, "--mesh", "fsdp=2"), Code.USAGE), (("--no-share",), Code.USAGE),
        (("--mesh", "qq=2"), Code.USAGE), (("--mesh", "fsdp=2", "--sizes"), Code.USAGE),
        (("--ranks", 2, "--shard", "x"), Code.USAGE), (("--ranks", 2, "--tensors", "none"), Code.MISMATCH),
    ):  # fmt: skip
        found, _, err = run("show", saved / "step-3", *arguments)
        assert found == code and err


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("ls",), ("show",), ("show", "--stats"), ("show", "--values"), ("show", "--layout"), ("show", "--sizes"),
    ("show", "--ranks", "3"),
)  # fmt: skip


QUICK = ("dcp_fsdp2_tp_2x2", "torchsave_zip_tied_views")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_format(run: Any, name: str) -> None:
    path = GOLDEN / name / "ckpt"
    before = contents_of(path)
    for word, *options in COMMANDS:
        code, out, err = run(word, path, *options)
        assert (code, bool(out)) == (Code.FINE, True), (word, err)
        code, out, err = run(word, path, *options, "--json")
        assert code == Code.FINE and json.loads(out), (word, err)
    assert run("diff", path, path, "--names-only")[0] == Code.FINE
    assert contents_of(path) == before


def test_a_url(run: Any, moto: Server, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = moto.bucket()
    options = options_of(moto)
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", options["region"])
    for step in ("step-3", "step-4"):
        holdfast.copy(saved / step, f"s3://{bucket}/run/{step}")
    url = f"s3://{bucket}/run"
    told = json.loads(run("ls", url, "--headers", "--json")[1])
    assert [(s["name"], s["health"]) for s in told["checkpoints"]] == [("step-3", "whole"), ("step-4", "whole")]
    told = json.loads(run("ls", f"s3://{bucket}", "--json")[1])["runs"]
    assert [(one["name"], one["steps"], one["newest"]["step"]) for one in told] == [("run", 2, 4)]
    assert run("verify", url)[1].splitlines()[-1] == "2 of 2 steps are whole"
    assert run("diff", saved / "step-3", f"{url}/step-3")[0] == Code.FINE
    assert run("diff", f"{url}/step-3", f"{url}/step-4")[0] == Code.DIFFERENT
    for word, *options in (("show", "--stats"), ("show", "--sizes"), ("show", "--ranks", "2")):
        assert run(word, f"{url}/step-3", *options)[0] == Code.FINE
    assert "each file once" in run("ls", url, "--sizes")[1]


def test_diff_tells_a_list_that_one_lacks_on_one_line(run: Any, tmp_path: Path) -> None:
    w = torch.ones(3)
    holdfast.save({"w": w, "names": [f"n{i}" for i in range(12)], "at-10": 1, "at-9": 1}, tmp_path / "a")
    holdfast.save({"w": w}, tmp_path / "b")
    for first, second, cells in (("a", "b", ["12 items", "none"]), ("b", "a", ["none", "12 items"])):
        out = run("diff", tmp_path / first, tmp_path / second, "--top", 3)[1]
        lines = [line.strip() for line in out.splitlines() if line.startswith(("names", "at-"))]
        assert [line.split()[0] for line in lines] == ["at-9", "at-10", "names/0"] and "more" not in out
        assert lines[2].startswith("names/0 … 11 ") and lines[2].split("11", 1)[1].split() == " ".join(cells).split()
    assert len(json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])["differences"]) == 14
