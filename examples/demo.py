"""What holdfast promises, shown on a real run in two minutes: `make demo`.

Four ranks train a small GPT (train.py); one of them is killed in the middle of a save; two ranks on another mesh go on.
Then the checkpoint is opened in one process and its files are read with plain safetensors. Everything that is said is
checked: the exit code is 0 only if all of it is true.
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
from collections.abc import Iterator
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


def pid_of_rank(torchrun: int, rank: int) -> int:
    """The process of one rank: a child of torchrun, which has put the rank into its environment."""
    for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise RuntimeError(f"torchrun has no child with RANK={rank}")


def is_committed(folder: Path) -> bool:
    return (folder / "manifest.json").exists()


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def contents(folder: Path) -> str:
    sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
    files = f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {sum(sizes):,} bytes"
    return f"{files}, {'a' if is_committed(folder) else 'no'} manifest.json"


def kill_during_a_save(torchrun: subprocess.Popen[bytes], run: Path, after: int) -> Path | None:
    """Wait for a save later than step ``after``; kill a rank while data is there and the manifest is not.

    A save takes a tenth of a second, so the rank is first stopped (SIGSTOP). If the manifest has not come half a
    second later, it cannot come without this rank, and the kill falls into the middle of the save. If it has come,
    the rank was done already: it is let go, and the next save is tried.
    """
    while torchrun.poll() is None:
        time.sleep(0.001)
        for folder in run.glob("step-*"):
            if step_of(folder) <= after or is_committed(folder) or not any(folder.rglob("*.safetensors")):
                continue
            pid = pid_of_rank(torchrun.pid, VICTIM)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            if not is_committed(folder):
                os.kill(pid, signal.SIGKILL)
                return folder
            os.kill(pid, signal.SIGCONT)
            after = step_of(folder)
    return None


def log_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of the run's log that tell of a ``"step"``, of a step ``"saved"`` or ``"restored"``."""
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
    table = Table(title="every save of this run", title_justify="left")
    for column in ("step", "ranks", "bytes", "seconds", "GB/s", "loss"):
        table.add_column(column, justify="right")
    table.add_column("now")
    for save in log_of(run, "saved"):
        there = is_committed(run / f"step-{save['saved']:09d}")
        table.add_row(
            str(save["saved"]), str(save["ranks"]), f"{save['bytes']:,}", f"{save['seconds']:.3f}",
            f"{save['bytes'] / save['seconds'] / 1e9:.2f}", f"{save['loss']:.3f}",
            "kept" if there else "dropped, by keep=",
        )  # fmt: skip
    return table


def demo(folder: Path) -> int:
    run, first_output, second_output = folder / "run", folder / "first-run.txt", folder / "second-run.txt"
    began = time.monotonic()

    title("1  Four ranks train with FSDP2, sharded over all; a rank is killed in the middle of a save")
    with training(run, 4, first_output, "--steps=1000") as torchrun:
        interrupted = kill_during_a_save(torchrun, run, after=2 * EVERY)
        if interrupted is None:
            return stop_here(first_output)
        tell(f"rank {VICTIM} gets SIGKILL while step {step_of(interrupted)} is being saved: {contents(interrupted)}")
        code = torchrun.wait(timeout=90)
    check(code != 0, f"the run dies with it (torchrun ends with code {code})")
    reasons = re.findall(r"SaveFailed: (save failed .*)", first_output.read_text(errors="replace"))
    if reasons:
        tell(f"what the other ranks say: {reasons[0]}")

    title("2  What lies on disk")
    tell(f"{interrupted.name}: {contents(interrupted)}; what the living ranks wrote they have removed")
    try:
        holdfast.open(interrupted)
        check(False, f"{interrupted.name} is no checkpoint")
    except holdfast.NotACheckpoint as error:
        check(True, f"{interrupted.name} is no checkpoint: {error}")
    whole = sorted(f for f in run.glob("step-*") if is_committed(f))
    for path in whole:
        stats = holdfast.open(path).verify()
        check(True, f"{path.name} is whole: {stats.read:,} bytes read, every sum is right")
    last = whole[-1]
    check(step_of(last) == step_of(interrupted) - EVERY, f"the last one is of the save before: step {step_of(last)}")

    title("3  Two ranks go on, on another mesh: two replicas instead of four shards")
    until = step_of(last) + 2 * EVERY
    with training(run, 2, second_output, f"--steps={until}", "--mesh=2x1") as torchrun:
        code = torchrun.wait(timeout=90)
    if code != 0 or not log_of(run, "restored"):
        return stop_here(second_output)
    restored = log_of(run, "restored")[-1]
    at = step_of(last)
    check((restored["restored"], restored["ranks"]) == (at, 2), f"2 ranks go on after step {at}, saved by 4")
    check(restored["seen"] == at * BATCH, f"the loader goes on after sample {restored['seen']}, which was the last one")
    before, after = [entry["loss"] for entry in log_of(run, "step") if entry["step"] == at + 1]
    check(
        abs(before - after) < 0.3,
        f"step {at + 1} sees the same batch: loss {after:.3f}, on 4 ranks {before:.3f} (other dropout)",
    )
    reached = [entry["step"] for entry in log_of(run, "step")][-1]
    check(reached == until, f"the run goes on to step {reached}")
    holdfast.open(interrupted).verify()
    check(True, f"{interrupted.name}, once interrupted, was swept, saved anew, and is whole now")

    title("4  Model, optimizer, scheduler, loader, random generators: the same bits")
    digests = {
        "on 4 ranks when it was saved": next(s["digest"] for s in log_of(run, "saved") if s["saved"] == at),
        "on 2 ranks when it was restored": restored["digest"],
        "read by one process": digest_of_checkpoint(last),
    }
    for where, digest in digests.items():
        tell(f"{digest[:32]}…  {where}")
    check(len(set(digests.values())) == 1, f"the state of step {at} has one digest everywhere")

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
