"""Fingerprints: equal for equal bytes however they lie, different for whatever differs; and saves that go by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.buffers.device import Copier, Moments
from holdfast.commit import settle
from holdfast.ondisk.box import Box, whole
from holdfast.policies.incremental import fingerprint, same
from holdfast.policies.incremental.fingerprint import Fingerprints
from holdfast.ranks.ranks import ranks_of
from tests.gpu.standin import pretend, pretend_states
from tests.marks import examples

SMALL_ROW, SMALL_ROWS = 8, 3
"""Stretches of 32 bytes, three at a time: tensors of a test have many of them."""


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if host memory were a device's."""
    monkeypatch.setattr(fingerprint, "applies", lambda tensor: True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Fingerprints:
    monkeypatch.setattr(fingerprint, "ROW", SMALL_ROW)
    monkeypatch.setattr(fingerprint, "ROWS", SMALL_ROWS)
    return Fingerprints()


def _of(made: Fingerprints, *tensors: torch.Tensor) -> list[bytes]:
    named = [(str(number), whole(tensor.shape), tensor) for number, tensor in enumerate(tensors)]
    prints = made.take(named, Copier(Moments()))
    return [prints[name, box] for name, box, tensor in named if tensor.nbytes]


def test_every_flipped_bit_shows(small: Fingerprints) -> None:
    for length in (1, 3, 4, 31, 32, 33, 96, 97, 100, 130):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8)
        flipped = []
        for bit in range(8 * length):
            other = data.clone()
            other[bit // 8] ^= 1 << bit % 8
            flipped.append(other)
        found = _of(small, data, *flipped)
        assert len(set(found)) == 8 * length + 1


def test_swaps_types_and_lengths_show(small: Fingerprints) -> None:
    data = torch.arange(40, dtype=torch.float32)
    swapped = [data.roll(n) for n in range(1, 40)]
    others = [data.flip(0), torch.cat([data[8:16], data[:8], data[16:]]), data.view(torch.int32), data[:-1], -data]
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(1, 140)]
    found = _of(small, data, *swapped, *others, *zeros)
    assert len(set(found)) == len(found)


@given(st.binary(min_size=1, max_size=300), st.binary(min_size=1, max_size=300), st.integers(0, 7), st.integers(0, 299))
@settings(max_examples=examples(300))
def test_equal_if_and_only_if_the_bytes_are(one: bytes, other: bytes, shift: int, at: int) -> None:
    rows = fingerprint.ROW, fingerprint.ROWS
    fingerprint.ROW, fingerprint.ROWS = SMALL_ROW, SMALL_ROWS
    try:
        made = Fingerprints()
        first, second = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (one, other))
        moved = torch.frombuffer(bytearray(bytes(shift) + one), dtype=torch.uint8)[shift:]
        changed = first.clone()
        changed[at % len(one)] += 1
        found = _of(made, first, moved, second, changed)
        assert found[0] == found[1], "wherever they lie"
        assert (found[0] == found[2]) == (one == other) and found[0] != found[3]
    finally:
        fingerprint.ROW, fingerprint.ROWS = rows


def test_scattered_tensors_and_all_types(small: Fingerprints) -> None:
    numbers = torch.randint(0, 100, (12, 20))
    found = set()
    for dtype in (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        tensor = numbers.to(dtype) if dtype != torch.float8_e4m3fn else numbers.to(torch.float32).to(dtype)
        laid = [tensor, tensor.clone(), tensor.t().contiguous().t(), tensor.as_strided((12, 20), (20, 1))]
        prints = _of(small, *laid)
        assert len(set(prints)) == 1
        found.update(prints)
    assert len(found) == 6
    turned = torch.randn(6, 6, dtype=torch.complex64)
    assert len(set(_of(small, turned, turned.conj(), turned.conj().resolve_conj()))) == 2


def test_the_real_sizes_and_two_processes() -> None:
    """Across the stretches of the real table; another process has other coefficients."""
    data = torch.randint(0, 256, (4 * fingerprint.ROW * (fingerprint.ROWS + 1) + 13,), dtype=torch.uint8)
    other = data.clone()
    other[-1] ^= 128
    made = Fingerprints()
    one, two, again = _of(made, data, other, data.clone())
    assert one == again != two and _of(Fingerprints(), data) != [one]


def test_only_the_last_saves_are_remembered() -> None:
    made = Fingerprints()
    for save in range(10):
        made.remember(str(save), {("w", Box((), ())): bytes([save])})
    made.remember("none", {})
    assert [save for save in range(10) if made.of(str(save))] == [6, 7, 8, 9]


def _state(step: int) -> dict[str, Any]:
    frozen = {f"f{i}": torch.full((64, 256), float(i)) for i in range(6)}
    return {"model": {**frozen, "train": torch.full((8, 256), float(step))}, "step": step}


def _is(path: Path, state: dict[str, Any]) -> int:
    """Bytes that this save wrote."""
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    found = checkpoint.state_dict()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in state["model"].items())
    return sum(file.bytes for file in checkpoint.manifest.data_files if file.save is None)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks whose bytes were compared."""
    seen: list[int] = []
    real = same._look

    def look(job: Any, tally: Any) -> None:
        seen.extend(nbytes for _, _, nbytes, _ in job)
        real(job, tally)

    monkeypatch.setattr(same, "_look", look)
    return seen


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_what_is_known_from_the_last_save_is_not_looked_at(how: str, tmp_path: Path, summed: list[int]) -> None:
    ranks_of().remembered.pop("fingerprints", None)
    counts, wrote = [], []
    with holdfast.Saver(worker="thread") as saver:
        for step in range(4):
            base = tmp_path / str(step - 1) if step else None
            if how == "blocking":
                holdfast.save(_state(step), tmp_path / str(step), base=base)
            else:
                saver.save(_state(step), tmp_path / str(step), base=base).wait()
            counts.append(len(summed))
            wrote.append(_is(tmp_path / str(step), _state(step)))
    assert counts == [0, 7, 7, 7], "the first time sums have to tell, as the first save knew of no base"
    assert max(wrote[1:]) < 0.1 * wrote[0]


def test_what_has_changed_is_written_whatever_was_remembered(tmp_path: Path, summed: list[int]) -> None:
    state = _state(1)
    holdfast.save(state, tmp_path / "1")
    holdfast.save(state, tmp_path / "2", base=tmp_path / "1")
    looked = len(summed)
    state["model"]["f3"].view(torch.int32)[5, 5] ^= 1
    holdfast.save(state, tmp_path / "3", base=tmp_path / "2")
    assert len(summed) == looked and _is(tmp_path / "3", state) > state["model"]["f3"].nbytes
    # Another base than the one that was remembered: its sums tell.
    ranks_of().remembered["fingerprints"]._of.clear()
    holdfast.save(state, tmp_path / "4", base=tmp_path / "1")
    assert len(summed) > looked
    _is(tmp_path / "4", state)


def test_a_save_that_fails_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(_state(1), tmp_path / "1")
    made = ranks_of().remembered.setdefault("fingerprints", Fingerprints())
    before = dict(made._of)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(settle, "commit", fails)
    with pytest.raises(holdfast.SaveFailed):
        holdfast.save(_state(2), tmp_path / "2", base=tmp_path / "1")
    assert made._of == before


def test_on_a_device_nothing_is_copied_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a device, whose copies to the host are counted: once to compare sums, then only what trains."""
    fake = pretend(monkeypatch)
    pretend_states(monkeypatch)
    monkeypatch.setattr(fingerprint, "applies", lambda tensor: tensor.device.type != "cpu")
    ranks_of().remembered.pop("fingerprints", None)
    copied = []
    for step in range(4):
        state = _state(step)
        holdfast.save(state, tmp_path / str(step), base=tmp_path / str(step - 1) if step else None)
        copied.append(sum(fake.copies))
        fake.copies.clear()
        wrote = _is(tmp_path / str(step), state)
    train = state["model"]["train"].nbytes
    whole = sum(tensor.nbytes for tensor in state["model"].values())
    assert copied == [whole, whole + train, train, train] and wrote < 2 * train
