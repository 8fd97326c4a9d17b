"""The truth of the golden checkpoints is strict, and says what is wrong; the folder stays small."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.storage.local.local_place import LocalPlace
from tests.formats import expected, truth

WEIGHT = torch.arange(6.0).view(2, 3)
OTHERS = {"bias": expected.expected("bias", torch.ones(2, 3))}

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "missing": (lambda: None, "weight is None, not a tensor"),
    "dtype": (lambda: WEIGHT.half(), r"torch.float16 \[2, 3\], not torch.float32 \[2, 3\]"),
    "shape": (lambda: WEIGHT.view(3, 2), r"torch.float32 \[3, 2\], not torch.float32 \[2, 3\]"),
    "swapped": (lambda: torch.ones(2, 3), "wrong bytes: they are those of bias"),
    "columns first": (lambda: WEIGHT.T.reshape(2, 3), "they are in the order of columns"),
    "empty": (lambda: torch.zeros(2, 3), "they are all zero"),
    "minus zero": (lambda: WEIGHT * torch.tensor([-1.0, 1, 1]), r"the first values are \[-0.0, 1.0, 2.0, -3.0\]"),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_wrong_with_a_tensor(why: str) -> None:
    make, message = WRONG[why]
    entry = expected.expected("weight", WEIGHT)
    assert re.search(message, entry.fault(make(), OTHERS))
    assert entry.fault(WEIGHT.T.contiguous().T) == entry.fault(WEIGHT.clone().requires_grad_()) == ""


DTYPES = [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.float64]


def test_sums_of_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {f"{dtype}": torch.ones(3).to(dtype) for dtype in DTYPES}
    tensors |= {"number": torch.tensor(3), "nothing": torch.empty(0, 3), "cut": torch.arange(9.0)[1::3]}
    expected.write_sums(tmp_path / expected.SUMS, tensors)
    entries = expected.read_sums(tmp_path / expected.SUMS)
    assert entries == {name: expected.expected(name, tensor) for name, tensor in tensors.items()}
    assert not any(entries[name].fault(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_of_a_checkpoint_is_found(tmp_path: Path, bit: int) -> None:
    name = "hf_safetensors_single_tied"  # no checksums: whatever is there is read
    folder = LocalPlace(shutil.copytree(truth.GOLDEN / name / "ckpt", tmp_path / "ckpt"))
    truth.check(name, folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 1 << bit
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(AssertionError, match=r"model\..* has wrong bytes: the first values are"):
        truth.check(name, folder)


def test_every_golden_checkpoint_has_a_truth_and_all_are_small() -> None:
    files = [path for path in truth.GOLDEN.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 15_000_000
    assert [name for name in truth.NAMES if not truth.Truth(name).tensors] == []
