"""What `Checkpoint.read` and `state_dict` bring comes into new memory, into given tensors, or is the file itself."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.buffers import stable
from tests.formats.truth import NAMES, Truth, same


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    torch.manual_seed(1)
    tied = torch.randn(3, 5)
    model = {
        "w": torch.randn(300, 70), "b": torch.arange(7, dtype=torch.bfloat16), "n": torch.tensor(5), "empty":
        torch.empty(0, 4), "c": torch.randn(4, 3, dtype=torch.complex64), "tied": tied, "head": tied,
        "big": torch.randn(1200, 3000), "layers": [torch.ones(2), torch.zeros(3)], "a/b": torch.ones(4),
    }  # fmt: skip
    return {"model": model, "step": 7, "options": {"lr": 0.5}}


@pytest.fixture(scope="module")
def saved(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(str(holdfast.save(state, tmp_path_factory.mktemp("filling") / "c").path))


def zeros(node: Any) -> Any:
    """The same nest with other memory."""
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: zeros(value) for key, value in node.items()}
    return [zeros(value) for value in node]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list) else a == b


# Given tensors


def test_given_tensors_are_filled_and_come_back(saved: Path, state: dict[str, Any]) -> None:
    given = zeros(state["model"])
    del given["head"]
    found = holdfast.open(saved).state_dict(into={"model": given})
    assert equal(found, state)
    for key, tensor in given.items():
        assert found["model"][key] is tensor or key == "layers"
    assert found["model"]["head"] is given["tied"], "of tied tensors one is enough"
    assert found["model"]["layers"][1] is given["layers"][1]


def test_every_pattern_has_to_fit_something(saved: Path) -> None:
    checkpoint = holdfast.open(saved)
    for options in ({}, {"mmap": True}, {"into": {"model": {}}}):
        with pytest.raises(
            holdfast.errors.Mismatch, match=r"has nothing that fits only='modle/\*' \(did you mean model\?\)$"
        ):
            checkpoint.state_dict(["model", "modle/*"], **options)  # type: ignore[arg-type]
    with pytest.raises(holdfast.errors.Mismatch, match="only='' names nothing"):
        checkpoint.state_dict("")
    assert checkpoint.state_dict(["*"]).keys() == checkpoint.state_dict().keys()


def test_tensors_are_given_by_name_and_each_of_tied_ones(saved: Path, state: dict[str, Any]) -> None:
    given = {"model/tied": torch.zeros(3, 5), "model/head": torch.zeros(5, 3).t(), "model/layers/0": torch.zeros(2)}
    found = holdfast.open(saved).state_dict(only=list(given), into=given)
    assert torch.equal(given["model/tied"], state["model"]["tied"])
    assert torch.equal(given["model/head"], state["model"]["tied"])
    assert found["model"]["head"] is given["model/head"] and found["model"]["tied"] is given["model/tied"]
    escaped = {"model": {"a/b": torch.zeros(4)}}
    assert equal(holdfast.open(saved).state_dict(only="model/a%2Fb", into=escaped), {"model": {"a/b": torch.ones(4)}})


def test_a_modules_state_dict_can_be_given(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    checkpoint = holdfast.save({"model": model}, tmp_path / "c")
    checkpoint.state_dict(into={"model": other.state_dict()})
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
    checkpoint.state_dict("model/weight", into={"model": {"weight": model.weight}})
    assert model.weight.requires_grad and model.weight.grad_fn is None


def test_given_tensors_of_other_types_are_cast_on_demand(saved: Path, state: dict[str, Any]) -> None:
    given = {"model/w": torch.zeros(70, 300, dtype=torch.float64).t()}
    with pytest.raises(holdfast.errors.Mismatch, match=r"model/w is saved as float32, the given tensor is float64"):
        holdfast.open(saved).state_dict("model/w", into=given)
    holdfast.open(saved).state_dict("model/w", into=given, cast=True)
    assert torch.equal(given["model/w"], state["model"]["w"].double())


def test_every_misfit_is_listed_and_nothing_changed(saved: Path) -> None:
    given = {"model": {"w": torch.zeros(70, 300), "b": torch.zeros(7), "x": torch.zeros(1), "n": torch.tensor(0)}}
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.open(saved).state_dict("model", into=given)
    text = str(caught.value)
    assert "model/w has shape [300, 70], the given tensor [70, 300]" in text
    assert "model/b is saved as bfloat16" in text and "model/x is given, but" in text
    assert "model/big is saved, but no tensor is given" in text and str(saved) in text
    assert not given["model"]["n"]
    with pytest.raises(holdfast.errors.Mismatch, match="a int at model/n"):
        holdfast.open(saved).state_dict("model/n", into={"model": {"n": 3}})
    with pytest.raises(holdfast.errors.Unsupported, match="meta"):
        holdfast.open(saved).state_dict("model/w", into={"model/w": torch.empty(300, 70, device="meta")})
    with pytest.raises(holdfast.errors.Unsupported, match="expanded"):
        holdfast.open(saved).read("model/w", into=torch.zeros(70).expand(300, 70))
    with pytest.raises(holdfast.errors.Unsupported, match=r"DTensor: holdfast\.load fills those"):
        holdfast.open(saved).read("model/w", into=type("DTensor", (torch.Tensor,), {})(300, 70))
    with pytest.raises(ValueError, match="mmap"):
        holdfast.open(saved).state_dict(into={}, mmap=True)


def test_a_box_is_read_into_a_given_tensor(saved: Path, state: dict[str, Any]) -> None:
    checkpoint, whole = holdfast.open(saved), state["model"]["w"]
    memory = torch.zeros(20, 300, 2)
    view = memory[3:13, :, 1].t()
    assert checkpoint.read("model/w", (slice(None), (5, 15)), into=view) is view
    assert torch.equal(view, whole[:, 5:15]) and memory.count_nonzero() == view.count_nonzero()
    doubled = torch.zeros(300, 70, dtype=torch.float64)
    with pytest.raises(holdfast.errors.Mismatch, match="cast=True"):
        checkpoint.read("model/w", into=doubled)
    assert torch.equal(checkpoint.read("model/w", into=doubled, cast=True), whole.double())
    with pytest.raises(holdfast.errors.Mismatch, match=r"shape \[2, 70\], the given tensor \[300, 70\]"):
        checkpoint.read("model/w", (slice(0, 2),), into=torch.zeros(300, 70))


def test_what_a_save_still_copies_is_not_changed_under_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr("holdfast.checkpoint.wait_for_copies", lambda: waited.append(True))
    checkpoint = holdfast.open(saved)
    checkpoint.read("model/n"), checkpoint.state_dict("model/n")
    assert not waited
    checkpoint.read("model/n", into=torch.tensor(0))
    checkpoint.state_dict("model/n", into={"model/n": torch.tensor(0)})
    assert len(waited) == 2 and stable.wait_for_copies


# The file itself


def mapped(caplog: pytest.LogCaptureFixture, checkpoint: holdfast.Checkpoint, **options: Any) -> tuple[Any, int, int]:
    """The state, mapped; how many tensors of it were, and how many were read."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "holdfast"):
        found = checkpoint.state_dict(mmap=True, **options)
    text = next(r.getMessage() for r in caplog.records if "tensors mapped" in r.getMessage())
    words = text.rpartition(": ")[2].split()
    return found, int(words[0]), int(words[3])


@pytest.mark.parametrize("verify", [True, False])
def test_whole_tensors_are_the_file(
    saved: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture, verify: bool
) -> None:
    found, count, read = mapped(caplog, holdfast.open(saved), verify=verify)
    assert equal(found, state)
    assert (count, read) == (9, 1), "all but the empty one; tied ones are one"
    assert found["model"]["tied"] is found["model"]["head"]


def test_writing_to_a_mapped_tensor_never_reaches_the_file(saved: Path, state: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    found = holdfast.open(saved).state_dict(mmap=True)
    for key in ("w", "b", "big"):
        found["model"][key].mul_(2).add_(1)
    assert torch.equal(found["model"]["w"], state["model"]["w"] * 2 + 1)
    assert equal(holdfast.open(saved).state_dict(mmap=True), state)
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_mapping_lives_as_long_as_any_tensor(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    found = holdfast.open(folder).state_dict(mmap=True)
    assert mappings(folder) == 1 and len(os.listdir("/proc/self/fd")) == descriptors
    row = found["model"]["big"][7]
    expected = row.clone()
    del found
    gc.collect()
    assert mappings(folder) == 1
    shutil.rmtree(folder)
    assert torch.equal(row, expected), "deleted, but mapped"
    del row
    gc.collect()
    assert mappings(folder) == 0


def test_what_is_mapped_is_verified_unless_told_otherwise(saved: Path, state: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    file = next(folder.rglob("model/*.safetensors"))
    data = bytearray(file.read_bytes())
    at = data.find(bytes(state["model"]["big"].view(torch.uint8)[0].tolist()[:64]))
    data[at + 5000] ^= 1
    file.write_bytes(data)
    for verify in (True, "blocks"):
        with pytest.raises(holdfast.errors.Damaged, match=r"is altered: bytes .* in model/big, have another checksum"):
            holdfast.open(folder).state_dict(mmap=True, verify=verify)  # type: ignore[arg-type]
    found = holdfast.open(folder).state_dict(mmap=True, verify=False)
    assert not torch.equal(found["model"]["big"], state["model"]["big"])
    holdfast.open(folder).state_dict("model/w", mmap=True)  # what is not asked for is not read
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(holdfast.errors.Damaged, match="bytes"):
        holdfast.open(folder).state_dict(mmap=True, verify=False)
    file.unlink()
    with pytest.raises(holdfast.errors.Damaged, match="missing"):
        holdfast.open(folder).state_dict(mmap=True, verify=False)


PLAIN = ("dcp_ddp_2r", "dcp_single", "hf_safetensors_single_tied", "torchsave_zip_frozen")
"""These hold whole tensors as plain bytes."""

QUICK = (*PLAIN, "dcp_fsdp2_4r", "dcp_fsdp2_zstd_2r", "torchsave_legacy_views", "torchsnapshot_ddp_chunked_2r")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_other_formats_come_mapped_or_read(name: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = holdfast.open(Truth(name).path)
    found, count, read = mapped(caplog, checkpoint)
    expected = checkpoint.state_dict()
    leaves, others = flat(found), flat(expected)
    assert leaves.keys() == others.keys() and all(same(leaves[key], others[key]) for key in leaves)
    assert count + read == len({checkpoint.saved_name(name) for name in checkpoint.tensors})
    if name in PLAIN:
        assert count >= 3
    if name in ("dcp_fsdp2_4r", "dcp_fsdp2_zstd_2r"):
        assert read >= 3, "tensors in several cells, and compressed ones"


def flat(node: Any, at: str = "") -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {at: node}
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return {name: leaf for key, value in items for name, leaf in flat(value, f"{at}/{key}").items()}


def test_what_lies_in_a_store_is_read(saved: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    from holdfast.storage.local.local import Local
    from holdfast.storage.store_place import StorePlace

    found, count, read = mapped(caplog, holdfast.open(StorePlace(Local(saved.parent), saved.name)))
    assert equal(found, state) and count == 0 and read == 10


def test_what_cannot_be_mapped_is_read(
    saved: Path,
    state: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Numbers that do not begin at a multiple of their size, and files on a file system that maps none."""
    head = (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"n":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}}'
    )
    head += b" " * (1 - len(head) % 2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes([0, 0, 128, 63, 0, 0, 0, 64, 5, 6]))
    found, count, read = mapped(caplog, holdfast.open(path))
    assert (count, read) == (1, 1)
    assert found["model"]["w"].tolist() == [1, 2] and found["model"]["n"].tolist() == [5, 6]
    monkeypatch.setattr("holdfast.read.filling._mapping", lambda path: None)
    found, count, _ = mapped(caplog, holdfast.open(saved))
    assert count == 0 and equal(found, state)


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """A sparse file of a terabyte: whatever reserved memory for it, or read it, could not."""
    path, elements = tmp_path / "model.safetensors", 1 << 38
    head = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (elements, 4 * elements)
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        try:
            file.truncate(8 + len(head) + 4 * elements)
        except OSError:
            pytest.skip("no file system for a sparse file of a terabyte")
        file.seek(8 + len(head) + 4 * (elements - 2))
        file.write(bytes(torch.tensor([2.5, 3.5]).view(torch.uint8).tolist()))
    tensor = holdfast.open(path).state_dict(mmap=True)["model"]["w"]
    assert tensor.shape == (elements,) and tensor[-2:].tolist() == [2.5, 3.5] and tensor[0] == 0
    tensor[1] = 7
    assert tensor[:3].tolist() == [0, 7, 0]
