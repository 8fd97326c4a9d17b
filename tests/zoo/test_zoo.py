"""The zoo's judge, and the part of the zoo that torch alone is enough for. All of it is `make zoo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from zoo import judge, modules, odd_buffers, odd_modules, optimizers, schedules, trees, wrapped_modules
from zoo.case import Case, Run

CATALOGUES = (optimizers, modules, odd_modules, odd_buffers, wrapped_modules, schedules)
FEW = (
    "torch: AdamW in two groups", "torch: SGD momentum", "torch: a wrapper that accumulates",
    "torch: tied weights", "torch: weight_norm", "torch: a tree as extra state",
    "torch: SequentialLR", "torch: ReduceLROnPlateau",
)  # fmt: skip


def _judged(case: Case, folder: Path) -> dict[str, tuple[str, str]]:
    cells: dict[str, tuple[str, str]] = {}

    def tell(column: str, verdict: str, text: str) -> None:
        if column:
            cells[column] = verdict, text

    judge.in_one_process(case, folder, tell)
    return cells


def _case(name: str) -> Case:
    found = [case for catalogue in CATALOGUES for case in catalogue.cases()]
    return next(case for case in found if case.name == name)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.fast_cases("torch: tied weights", "torch: a tree as extra state")
def test_a_few_kinds(name: str, tmp_path: Path) -> None:
    assert {verdict for verdict, _ in _judged(_case(name), tmp_path).values()} == {"right"}


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for catalogue in CATALOGUES for case in catalogue.cases()]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_torch_on_one_process_and_on_several(tmp_path: Path) -> None:
    # In a process of its own: it forks, and must have a single thread to do so.
    kinds = ["optimizers/torch:", "modules/torch:", "schedules/torch:"]
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "--only", *kinds, "--json", str(tmp_path / "results.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr


def _adam(lay: Any) -> Run:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(number: int) -> Any:
        model(torch.full((1, 3), float(number + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach().clone()

    return Run({"model": model, "optimizer": optimizer}, step)


def _break_load(monkeypatch: pytest.MonkeyPatch, breaking: Any) -> None:
    load = holdfast.load

    def broken(path: Any, into: dict[str, Any], **options: Any) -> Any:
        loaded = load(path, into, **options)
        breaking(into, loaded)
        return loaded

    monkeypatch.setattr(holdfast, "load", broken)


def test_a_bit_in_a_parameter_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nudge(into: dict[str, Any], loaded: Any) -> None:
        weight = into["model"].weight.detach()
        weight.view(torch.int32)[0, 0] ^= 1

    _break_load(monkeypatch, nudge)
    assert {verdict for verdict, _ in _judged(Case("adam", "", _adam), tmp_path).values()} == {"wrong"}


def test_a_number_that_is_another_type_in_the_optimizer_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(into: dict[str, Any], loaded: Any) -> None:
        for state in into["optimizer"].state.values():
            state["step"] = state["step"].to(torch.float64)

    _break_load(monkeypatch, forget)
    cells = _judged(Case("adam", "", _adam), tmp_path)
    assert all(verdict == "wrong" and "/step" in text for verdict, text in cells.values()), cells


def test_a_refusal_after_a_change_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(into: dict[str, Any], loaded: Any) -> None:
        raise holdfast.errors.Mismatch("model/weight does not fit")

    _break_load(monkeypatch, refuse)
    cells = _judged(Case("adam", "", _adam), tmp_path)
    assert all(verdict == "wrong" and "changed before that" in text for verdict, text in cells.values()), cells


def test_an_error_of_another_kind_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast, "load", lambda *_, **__: 1 / 0)
    cells = _judged(Case("adam", "", _adam), tmp_path)
    assert all(verdict == "wrong" and "ZeroDivisionError" in text for verdict, text in cells.values()), cells


def test_a_refusal_that_names_a_leaf_and_changes_nothing_is_lawful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise holdfast.errors.Mismatch("model/weight does not fit")

    monkeypatch.setattr(holdfast, "load", refuse)
    cells = _judged(Case("adam", "", _adam), tmp_path)
    assert {verdict for verdict, _ in cells.values()} == {"refused"}


def test_trees_differ_in_a_bit_a_dtype_a_key_and_hardly_in_a_type() -> None:
    one = {"a": torch.tensor([0.0, 1.0]), "b": [1, 2.0]}
    for other, slight in (
        ({"a": torch.tensor([-0.0, 1.0]), "b": [1, 2.0]}, False),
        ({"a": torch.tensor([0.0, 1.0], dtype=torch.float64), "b": [1, 2.0]}, False),
        ({"a": torch.tensor([0.0, 1.0])}, False),
        ({"a": torch.tensor([0.0, 1.0]), "b": [1.0, 2.0]}, True),
        ({"a": torch.tensor([0.0, 1.0]), "b": (1, 2.0)}, True),
    ):
        found = list(trees.differences(one, other))
        assert len(found) == 1 and found[0].slight is slight
    assert not list(trees.differences(one, trees.copied(one)))
