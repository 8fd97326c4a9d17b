"""Fingerprints that a device takes: those of the host, bit for bit, and saves that copy only what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.buffers.device import Copier, Moments, devices_of
from holdfast.ondisk.box import whole
from holdfast.policies.incremental import fingerprint
from holdfast.policies.incremental.fingerprint import Fingerprints
from tests.gpu import standin, states
from tests.gpu.lab import REAL, Lab, trials
from tests.tearing import differences


def prints_of(made: Fingerprints, tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    named = [(name, whole(tensor.shape), tensor) for name, tensor in tensors.items()]
    copier = Copier(Moments.now(devices_of(tensors.values())))  # after what this thread has queued, as a save is
    return {name: found for (name, _), found in made.take(named, copier).items()}


def there(lab: Lab, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors if lab.fake is None else {name: standin.pretended(tensor) for name, tensor in tensors.items()}


def test_a_device_takes_the_fingerprints_of_the_host(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of tensor; so that arithmetic modulo 2^64, casts and sums are those that the proof speaks of."""
    tensors = states.every_kind(lab.kind, 5, large=3_000_001)
    made = Fingerprints()
    taken = prints_of(made, there(lab, tensors))
    monkeypatch.setattr(fingerprint, "applies", lambda tensor: True)
    assert prints_of(Fingerprints(made.key), {name: tensor.cpu() for name, tensor in tensors.items()}) == taken
    assert len(set(taken.values())) > 0.9 * len(taken), "and they tell tensors apart"


@pytest.mark.slow
def test_any_flipped_bit_shows(lab: Lab) -> None:
    made = Fingerprints()
    data = states.noise((3_000_001,), torch.uint8, lab.kind, 1)
    first = prints_of(made, there(lab, {"t": data}))
    for draw in trials(5.0 if REAL else 1.0, least=10, most=3000):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        data[at] ^= 1 << bit
        assert prints_of(made, there(lab, {"t": data})) != first, (at, bit)
        data[at] ^= 1 << bit
    assert prints_of(made, there(lab, {"t": data})) == first


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.slow
def test_what_did_not_change_is_not_copied(how: str, lab: Lab, tmp_path: Path) -> None:
    """Files that stay are known from fingerprints; what trains is copied, and so is a file with a flipped bit."""
    frozen = {f"f{number}": states.noise((300, 500), torch.float32, lab.kind, number) for number in range(6)}
    trained = {"t": states.noise((1000,), torch.float32, lab.kind, 9)}
    copied: list[int] = []

    with holdfast.Saver(worker="thread") as saver:

        def save(number: int) -> None:
            state = {"frozen": frozen, "trained": trained}
            base = tmp_path / str(number - 1) if number else None
            lab.copied.clear()
            if how == "blocking":
                holdfast.save(state, tmp_path / str(number), base=base)
            else:
                saver.save(state, tmp_path / str(number), base=base).wait()
            copied.append(sum(lab.copied))
            checkpoint = holdfast.open(tmp_path / str(number))
            checkpoint.verify()
            found = {name: checkpoint.read(f"frozen/{name}") for name in frozen}
            assert differences(found, {name: tensor.cpu() for name, tensor in frozen.items()}) == []
            assert differences(checkpoint.read("trained/t"), trained["t"].cpu()) == []

        for number in range(5):
            if number == 4:
                frozen["f3"].view(torch.int32)[17, 3] ^= 1 << 9
            save(number)
            trained["t"].add_(1)
    nbytes = sum(tensor.nbytes for tensor in frozen.values())
    assert copied[0] >= nbytes and copied[2] == copied[3] == trained["t"].nbytes
    assert copied[4] >= frozen["f3"].nbytes


@pytest.mark.slow
def test_fingerprints_are_taken_of_the_moment_of_the_call(lab: Lab, tmp_path: Path) -> None:
    """Training is far ahead or far behind when they are taken: they are of the state that is saved."""
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 3)
    training.run(2)
    base = None
    with holdfast.Saver(worker="thread") as saver:
        for number in range(4):
            training.learn()
            lab.busy(30)
            with torch.no_grad():
                training.model.up.bias.add_(1.0)
            lab.late(30)
            saving = saver.save(training.state, tmp_path / str(number), base=base)
            expected = training.copy()
            training.update()
            saving.wait()
            base = tmp_path / str(number)
            other = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 4)
            holdfast.load(base, other.state)
            assert differences(other.copy(), expected) == []
