"""What holdfast promises, shown on a real run in two minutes: `make demo`.

Four ranks train a small GPT (train.py); one of them is killed in the middle of a save; two ranks on another mesh go on.
Both of these are killed too, once a save has copied everything and before it is committed; one process goes on from
that very save. Then a checkpoint is opened in one process and its files are read with plain safetensors. Everything
that is said is checked: the exit code is 0 only if all of it is true.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from digest import digest_of_checkpoint
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from train import GPT

import holdfast

EVERY, BATCH = 5, 8
SIZES = {"layers": 3, "width": 256, "context": 64}
VICTIM = 3  # the rank that is killed
DEADLINE = 10  # seconds that the other ranks wait for it

console = Console(highlight=False, soft_wrap=True)
failed: list[str] = []


def title(text: str) -> None:
    console.print(f"\n[bold cyan]{escape(text)}[/]")


def tell(text: str) -> None:
    console.print(f"  {escape(text)}")


def check(holds: bool, text: str) -> None:
    console.print(f"  [green]✓[/] {escape(text)}" if holds else f"  [bold red]✗ NOT TRUE:[/] {escape(text)}")
    if not holds:
        failed.append(text)


# Running the training.


@contextmanager
def training(run: Path, ranks: int, output: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """train.py under torchrun, its output in a file; whatever happens, no process of it is left behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    command += [f"--nproc-per-node={ranks}", str(Path(__file__).with_name("train.py")), f"--root={run}", "--digest"]
    command += [f"--every={EVERY}", f"--batch={BATCH}", f"--deadline={DEADLINE}"]
    command += [f"--{name}={value}" for name, value in SIZES.items()]
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [*command, *options], stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun takes its ranks with it
            process.wait()


def pids_of_ranks(torchrun: int) -> dict[int, int]:
    """The process of each rank: a child of torchrun, which has put the rank into its environment."""
    found = {}
    for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry.removeprefix(b"RANK="))] = int(pid)
    return found


def is_committed(folder: Path) -> bool:
    return (folder / "manifest.json").exists()


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def contents(folder: Path) -> str:
    sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
    files = f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {sum(sizes):,} bytes"
    return f"{files}, {'a' if is_committed(folder) else 'no'} manifest.json"


def parts_of(folder: Path) -> set[int]:
    """The ranks whose data of a save is durable: each has left a note of it, its part, beside the data."""
    return {int(file.name.split(".")[0]) for file in folder.glob("parts/*.json")}


def kill_during_a_save(
    torchrun: subprocess.Popen[bytes], run: Path, after: int, victims: set[int], sign: str,
    wanted: Callable[[Path], bool],
) -> Path | None:  # fmt: skip
    """Wait for a save later than step ``after`` that shows a ``sign``, and kill ranks if it stands as ``wanted``.

    A save takes a tenth of a second, so the ranks are first stopped (SIGSTOP), for long enough that their writers
    finish what they have. If the save has no manifest then, none can come without these ranks: what is killed now is
    killed in the middle of it. If it has one, or stands otherwise, the ranks are let go, and the next save is tried.
    """
    while torchrun.poll() is None:
        time.sleep(0.001)
        for folder in run.glob("step-*"):
            if step_of(folder) <= after or is_committed(folder) or not any(folder.glob(sign)):
                continue
            pids = [pid for rank, pid in pids_of_ranks(torchrun.pid).items() if rank in victims]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            hit = not is_committed(folder) and wanted(folder)
            for pid in pids:
                os.kill(pid, signal.SIGKILL if hit else signal.SIGCONT)
            if hit:
                return folder
            after = step_of(folder)
    return None


def log_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of the run's log of one kind: ``"step"``, ``"saving"``, ``"saved"``, or ``"restored"``."""
    log = run / "log.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [entry for entry in entries if kind in entry]


def stop_here(output: Path) -> int:
    """The demo cannot go on: show why."""
    console.print(f"[bold red]the run did not get that far; the end of {output}:[/]")
    console.print(escape("\n".join(output.read_text(errors="replace").splitlines()[-30:])))
    return 1


# Reading a checkpoint without holdfast.


def box_of(key: str) -> tuple[str, tuple[slice, ...]]:
    """The tensor that a key of a data file belongs to, and which part: ``head.weight[0:64,0:256]``."""
    name, _, box = key.partition("[")
    spans = re.findall(r"(\d+):(\d+)", box)
    return name, tuple(slice(int(a), int(b)) for a, b in spans)


def read_with_safetensors(files: list[Path], whole: dict[str, torch.Tensor]) -> bool:
    """Whether the files of one section, opened with plain safetensors, hold every element, and each the right one."""
    elements = 0
    for file in files:
        for key, piece in safetensors.torch.load_file(file).items():
            name, part = box_of(key)
            if not torch.equal(piece, whole[name][part]):
                return False
            elements += piece.numel()
    return elements == sum(tensor.numel() for tensor in whole.values())


def table_of_saves(run: Path) -> Table:
    table = Table(title="every save that the run told of", title_justify="left")
    for column in ("step", "ranks", "bytes", "seconds", "training waited", "loss"):
        table.add_column(column, justify="right")
    table.add_column("now")
    for save in log_of(run, "saved"):
        there = is_committed(run / f"step-{save['saved']:09d}")
        table.add_row(
            str(save["saved"]), str(save["ranks"]), f"{save['bytes']:,}", f"{save['seconds']:.3f}",
            f"{save['waited']:.3f}", f"{save['loss']:.3f}",
            "kept" if there else "dropped",
        )  # fmt: skip
    return table


def restored_by(run: Path, ranks: int, at: int) -> dict[str, Any]:
    """Check that the last start of a run was by so many ranks and went on after step ``at``; its line of the log."""
    restored = log_of(run, "restored")[-1]
    who = "1 process goes" if ranks == 1 else f"{ranks} ranks go"
    check(
        (restored["restored"], restored["ranks"]) == (at, ranks),
        f"{who} on after step {at}, saved by {restored['saved_by']} ranks",
    )
    check(restored["seen"] == at * BATCH, f"the loader goes on after sample {restored['seen']}, which was the last one")
    return restored


def same_bits(run: Path, at: int, digests: dict[str, str]) -> None:
    saved = next(entry for entry in log_of(run, "saving") if entry["saving"] == at)
    digests = {"of the live state, when it was saved": saved["digest"], **digests}
    for where, digest in digests.items():
        tell(f"{digest[:32]}…  {where}")
    check(
        len(set(digests.values())) == 1,
        f"model, optimizer, scheduler, loader, random generators of step {at}: the same bits",
    )


def demo(folder: Path) -> int:
    run = folder / "run"
    outputs = [folder / f"{which}-run.txt" for which in ("first", "second", "third")]
    began = time.monotonic()

    title("1  Four ranks train with FSDP2, sharded over all; a rank is killed in the middle of a save")
    with training(run, 4, outputs[0], "--steps=1000") as torchrun:
        torn = kill_during_a_save(
            torchrun, run, 2 * EVERY, {VICTIM}, "*/*.safetensors", lambda save: VICTIM not in parts_of(save)
        )
        if torn is None:
            return stop_here(outputs[0])
        tell(f"rank {VICTIM} gets SIGKILL before it has copied all of step {step_of(torn)}: {contents(torn)}")
        code = torchrun.wait(timeout=90)
    check(code != 0, f"the run dies with it (torchrun ends with code {code})")
    reasons = re.findall(r"save failed \(.*", outputs[0].read_text(errors="replace"))
    if reasons:
        tell(f"what the other ranks say: {reasons[0]}")

    title("2  What lies on disk")
    there = ", ".join(map(str, sorted(parts_of(torn))))
    tell(f"{torn.name}: {contents(torn)}; all of ranks {there}, not all of rank {VICTIM}")
    try:
        holdfast.open(torn)
        check(False, f"{torn.name} is no checkpoint")
    except holdfast.errors.NotACheckpoint as error:
        check(True, f"{torn.name} is no checkpoint: {error}")
    whole = sorted(f for f in run.glob("step-*") if is_committed(f))
    for path in whole:
        stats = holdfast.open(path).verify()
        check(True, f"{path.name} is whole: {stats.read:,} bytes read, every sum is right")
    last = whole[-1]
    at = step_of(last)
    check(at == step_of(torn) - EVERY, f"the last one is of the save before: step {at}")
    last = Path(shutil.copytree(last, folder / last.name))  # keep= drops it in time

    title("3  Two ranks go on, on another mesh; both are killed when a save is copied and not yet committed")
    with training(run, 2, outputs[1], "--steps=1000", "--mesh=2x1") as torchrun:
        finished = kill_during_a_save(
            torchrun, run, step_of(torn), {0, 1}, "parts/*.json", lambda save: parts_of(save) == {0, 1}
        )
        if finished is None:
            return stop_here(outputs[1])
        torchrun.wait(timeout=90)
    restored = restored_by(run, 2, at)
    before, after = [entry["loss"] for entry in log_of(run, "step") if entry["step"] == at + 1]
    check(
        abs(before - after) < 0.3,
        f"step {at + 1} sees the same batch: loss {after:.3f}, on 4 ranks {before:.3f} (other dropout)",
    )
    anew = [save for save in log_of(run, "saved") if save["saved"] == step_of(torn)]
    check(
        [save["ranks"] for save in anew] == [2], f"{torn.name}, once interrupted, was swept and saved anew by 2 ranks"
    )
    same_bits(
        run, at, {"on 2 ranks when it was restored": restored["digest"], "in one process": digest_of_checkpoint(last)}
    )

    title("4  One process goes on: the save that nobody was left to commit is committed first")
    tell(f"{finished.name}: {contents(finished)}; the writers of both ranks had finished their parts")
    until = step_of(finished) + EVERY
    with training(run, 1, outputs[2], f"--steps={until}") as torchrun:
        code = torchrun.wait(timeout=90)
    if code != 0:
        return stop_here(outputs[2])
    restored = restored_by(run, 1, step_of(finished))
    same_bits(run, step_of(finished), {"in one process when it was restored": restored["digest"]})
    reached = [entry["step"] for entry in log_of(run, "step")][-1]
    check(reached == until, f"the run goes on to step {reached}")
    for path in sorted(run.glob("step-*")):
        holdfast.open(path).verify()
        check(True, f"{path.name} is whole")

    title("5  One process opens a checkpoint")
    checkpoint = holdfast.open(last)
    info = checkpoint.tensors["model/blocks.0.up.weight"]
    tell(f"step {checkpoint.step}, {len(checkpoint.tensors)} tensors, {checkpoint.nbytes:,} bytes, by 4 ranks")
    tell(f"{info.name}: {info.dtype}, shape {list(info.shape)}, in {len(info.boxes)} boxes")
    part = checkpoint.read(info.name, (slice(0, 3), slice(0, 5)))
    check(part.shape == (3, 5), "a slice is read without the rest of the tensor")
    model = checkpoint.state_dict("model")["model"]
    shards = sorted(last.glob("model/*.safetensors"))
    check(read_with_safetensors(shards, model), f"its {len(shards)} model files open with plain safetensors")

    title("6  Saved by one process, the model is one safetensors file that any tool can load")
    gpt = GPT(**SIZES, dropout=0.0)
    holdfast.load(last, {"model": gpt}, only="model")
    holdfast.save({"model": gpt}, folder / "export")
    (file,) = folder.glob("export/model/*.safetensors")
    other = GPT(**SIZES, dropout=0.0)
    other.load_state_dict(safetensors.torch.load_file(file))
    tokens = torch.randint(256, (1, SIZES["context"]))
    check(torch.equal(gpt(tokens), other(tokens)), "model.load_state_dict(load_file(…)) gives the same model")

    console.print()
    console.print(table_of_saves(run))
    seconds = time.monotonic() - began
    if failed:
        console.print(f"[bold red]{len(failed)} checks failed[/] ({seconds:.0f} s):")
        for text in failed:
            tell(text)
        return 1
    console.print(f"[bold green]all checks passed[/] ({seconds:.0f} s); the run lies in {escape(str(folder))}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-run"), help="for all that is made (%(default)s)")
    folder = parser.parse_args().folder
    ours = folder / "first-run.txt"
    if folder.exists() and any(folder.iterdir()) and not ours.exists():
        parser.error(f"{folder} is there and not from an earlier demo; choose another --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return demo(folder)


if __name__ == "__main__":
    sys.exit(main())
