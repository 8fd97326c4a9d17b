"""What torch.save writes, in both containers and many versions of it, against torch's own reading of it."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import tarfile
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import Damaged, StorageError, Unsupported
from holdfast.formats.machine import torch_files
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.machine.torch_files import is_torch_file, load_file, load_path, load_pickle
from holdfast.formats.sources import Memory, all_of
from holdfast.formats.stored import Opaque, Stored
from holdfast.ondisk import dtypes
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import hostile
from tests.formats.truth import GOLDEN
from tests.marks import examples
from tests.ondisk.test_format import bytes_of
from tests.ondisk.test_format import of_bytes as tensor_of_bytes

WHERE = LocalPlace("some/file.pt")
BOTH = pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])


def saved(value: Any, *, new: bool = True, protocol: int = 2) -> bytes:
    target = io.BytesIO()
    torch.save(value, target, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    return target.getvalue()


def read(data: bytes) -> Any:
    return load_file(all_of(Memory(WHERE, data)))


def same(found: Any, tensor: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, and whole by its own account."""
    if not isinstance(found, Stored) or found.fault() is not None:
        return False
    loaded = found.read()
    return loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and bytes_of(loaded) == bytes_of(tensor)


# Tensors


@dataclass(frozen=True)
class Made:
    """A storage and views of it; hypothesis shows this. A view is (steps, turned) for narrowings and permutations."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    views: tuple[str, ...]

    def tensors(self) -> list[torch.Tensor]:
        whole = tensor_of_bytes(self.data, dtypes.torch_dtype(self.dtype), self.shape)
        return [_VIEWS[view](whole) for view in self.views]


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "again": lambda t: t.detach(),
    "turned": lambda t: t.permute(tuple(range(t.dim()))[::-1]),
    "flat": lambda t: t.reshape(-1) if t.numel() else t,
    "steps": lambda t: t[::2] if t.dim() else t,
    "tail": lambda t: t[1:] if t.dim() else t,
    "inner": lambda t: t[..., 1:3] if t.dim() else t,
    "row": lambda t: t[-1] if t.dim() and t.shape[0] else t,
    "empty": lambda t: t[:0] if t.dim() else t,
    "wide": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "parameter": lambda t: nn.Parameter(t, requires_grad=t.dtype.is_floating_point),
    "buffer": lambda t: nn.Buffer(t),
    "conjugate": lambda t: t.conj() if t.is_complex() else t,
    "minus": lambda t: torch._neg_view(t) if t.dtype in (torch.float32, torch.float64, torch.float16) else t,
}


def _is_saved(name: str) -> bool:
    try:
        saved(torch.zeros(16, dtype=torch.uint8).view(dtypes.torch_dtype(name)))
        saved(torch.zeros(16, dtype=torch.uint8).view(dtypes.torch_dtype(name)), new=False)
    except (KeyError, RuntimeError, NotImplementedError):
        return False
    return True


SAVED = sorted(filter(_is_saved, dtypes._BY_NAME))  # torch has types that it cannot save


@st.composite
def made(draw: st.DrawFn) -> Made:
    dtype = draw(st.sampled_from(SAVED))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    nbytes = dtypes.itemsize(dtype)
    for n in shape:
        nbytes *= n
    views = draw(st.lists(st.sampled_from(sorted(_VIEWS)), min_size=1, max_size=4))
    return Made(dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)), tuple(views))


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(st.lists(made(), min_size=1, max_size=4), st.booleans(), st.integers(1, 5))
def test_tensors_as_torch_loads_them(groups: list[Made], new: bool, protocol: int) -> None:
    state = {f"{n}.{i}.{view}": tensor for n, group in enumerate(groups)
             for i, (view, tensor) in enumerate(zip(group.views, group.tensors(), strict=True))}  # fmt: skip
    data = saved({"model": state}, new=new, protocol=protocol)
    try:
        theirs = torch.load(io.BytesIO(data), weights_only=protocol == 2)["model"]
    except AttributeError:  # torch writes types without a storage class into the old container, and cannot read them
        assert not new
        theirs = state
    ours = read(data)["model"]
    assert ours.keys() == state.keys()
    for name, tensor in state.items():
        assert same(ours[name], theirs[name]) and same(ours[name], tensor), name
    with tempfile.TemporaryDirectory() as folder:
        path = LocalPlace(folder) / "model.pt"
        path.write_bytes(data)
        opened = holdfast.open(path)
        for name, tensor in state.items():
            loaded = opened.read(f"model/{name}")
            assert loaded.dtype == tensor.dtype and bytes_of(loaded) == bytes_of(tensor), name
            assert loaded.shape == tensor.shape


def test_every_type_that_torch_saves() -> None:
    assert {"float32", "bfloat16", "bool", "complex128", "float8_e4m3fn", "uint16", "uint64"} < {*SAVED}
    for name in SAVED:
        tensor = tensor_of_bytes(bytes(range(48)), dtypes.torch_dtype(name), (48 // dtypes.itemsize(name),))
        for new in (True, False):
            assert same(read(saved(tensor, new=new)), tensor), name


@BOTH
def test_tensors_that_share_their_bytes_are_equal(new: bool) -> None:
    base = torch.randn(4, 5)
    found = read(saved({"a": base, "b": base.detach(), "t": base.t(), "u": base.t(), "c": base.clone()}, new=new))
    assert found["a"] == found["b"] != found["c"] and found["t"] == found["u"]
    assert same(found["t"], base.t())


@BOTH
def test_conjugates_and_negatives_are_not_lost(new: bool) -> None:
    number = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": number.conj(), "adjoint": number.mH, "imaginary": number.clone().conj().imag}
    for key, tensor in state.items():
        assert tensor.is_conj() or tensor.is_neg()
        assert same(read(saved({key: tensor}, new=new))[key], tensor)


def test_parameters_and_attributes() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.note = "kept by torch, not by us"  # type: ignore[attr-defined]
    tensor = torch.randn(2)
    tensor.note = [1]  # type: ignore[attr-defined]
    found = read(saved({"p": parameter, "t": tensor, "m": nn.Linear(2, 3).state_dict()}))
    assert same(found["p"], parameter) and same(found["t"], tensor) and found["m"].keys() == {"weight", "bias"}


class _Tagged(torch.Tensor):
    pass


def test_a_subclass_is_the_tensor_that_it_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Tagged, "__module__", "torch")
    monkeypatch.setattr(torch, "_Tagged", _Tagged, raising=False)
    tensor = torch.randn(3).as_subclass(_Tagged)
    with caplog.at_level("INFO", "holdfast"):
        assert same(read(saved([tensor, tensor.detach()]))[0], tensor.as_subclass(torch.Tensor))
    assert caplog.text.count("torch._Tagged is read as the plain tensor") == 1


def test_a_wrapper_without_storage_is_a_record() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        data = saved(sharded)
    finally:
        dist.destroy_process_group()
    found = read(data)
    assert type(found) is Record and found.name == "torch.distributed.tensor.DTensor"
    assert same(found.get("_local_tensor"), torch.arange(6.0))
    assert found.args == ("float32", (6,))


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 2, torch.qint8)


OPAQUE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "sparse"),
    "quantized": (_quantized, "quantized"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "quantized",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "meta device"),
    "expanded": (lambda: torch.zeros(1).expand(1 << 30), "spread over only 1 elements"),
}


@BOTH
@pytest.mark.parametrize("name", OPAQUE)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_read_has_a_reason(name: str, new: bool, tmp_path: Path) -> None:
    make, reason = OPAQUE[name]
    data = saved({"model": {"odd": make(), "w": torch.ones(2)}}, new=new)
    found = read(data)["model"]
    assert isinstance(found["odd"], Opaque) and reason in found["odd"].reason
    assert same(found["w"], torch.ones(2))
    (tmp_path / "c.pt").write_bytes(data)
    opened = holdfast.open(tmp_path / "c.pt")
    assert list(opened.tensors) == ["model/w"] and list(opened.left_out) == ["model/odd"]


def test_a_type_that_this_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved([torch.zeros(3, dtype=torch.uint16), torch.ones(2)])
    monkeypatch.delitem(dtypes._BY_NAME, "uint16")
    found = read(data)
    assert "uint16" in found[0].reason and same(found[1], torch.ones(2))


@BOTH
@pytest.mark.parametrize("location", ["cuda:0", "cuda:7", "mps", "hpu", "xpu:1", "privateuse1", "never heard of"])
def test_storages_from_any_device(location: str, new: bool) -> None:
    # What was saved on a device differs from what was saved on the CPU in one word.
    tensor = torch.randn(3)
    if new:
        source, target = io.BytesIO(saved(tensor)), io.BytesIO()
        with zipfile.ZipFile(source) as theirs, zipfile.ZipFile(target, "w") as ours:
            for name in theirs.namelist():
                ours.writestr(name, _relocated(theirs.read(name), location) if "pkl" in name else theirs.read(name))
        assert same(read(target.getvalue()), tensor)
    else:
        assert same(read(_relocated(saved(tensor, new=False), location)), tensor)


def test_one_pickle_in_many_archives() -> None:
    """What a pickle of one tensor says is worked out once: its bytes, and their faults, are those of each archive."""
    shared = torch.arange(40.0)
    for tensor in (shared[8:20].clone(), shared[8:20], torch.arange(12).reshape(3, 4)):
        for number in range(3):
            tensor += number
            assert same(read(saved(tensor)), tensor)
    data = saved(torch.ones(50))
    assert same(read(data), torch.ones(50))
    for change, message in ((lambda held: held[:-4], "truncated or contradicts itself"), (None, "does not hold")):
        target = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
            for name in old.namelist():
                if not name.endswith("/data/0"):
                    new.writestr(name, old.read(name))
                elif change is not None:
                    new.writestr(name, change(old.read(name)))
        with pytest.raises(Damaged, match=message):
            read(target.getvalue())


def test_storages_laid_at_any_alignment() -> None:
    from torch.utils.serialization import config

    tensors = [torch.randn(5), torch.arange(100)]
    for alignment in (4, 64, 4096):
        with config.patch("save.storage_alignment", alignment):
            found = read(saved(tensors))
        assert all(map(same, found, tensors))
        assert found[1].pieces[0][1].begin % alignment == 0


def _relocated(data: bytes, location: str) -> bytes:
    raw = location.encode()
    assert b"X\x03\x00\x00\x00cpu" in data
    return data.replace(b"X\x03\x00\x00\x00cpu", b"X" + struct.pack("<I", len(raw)) + raw)


@BOTH
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_python_objects(new: bool, protocol: int) -> None:
    found = read(
        saved(
            OrderedDict(
                size=torch.Size([2, 3]),
                dtype=torch.float16,
                device=torch.device("cuda", 1),
                layout=torch.strided,
                args=argparse.Namespace(lr=0.1),
                numbers={1, 2},
                big=1 << 70,
                raw=b"\xff",
                nothing=None,
                step=(1, [2.5, "é"]),
                storage=torch.arange(5).storage(),
                raw_storage=torch.ones(2).untyped_storage(),
                version=torch.__version__,
            ),  # fmt: skip
            new=new,
            protocol=protocol,
        )  # fmt: skip
    )
    assert (found["size"], found["dtype"], found["device"]) == (
        torch.Size([2, 3]), Name("torch.float16"), torch.device("cuda:1"),
    )  # fmt: skip
    assert isinstance(found["size"], torch.Size)
    assert found["args"].get("lr") == 0.1 and found["numbers"] == {1, 2} and found["big"] == 1 << 70
    assert (found["raw"], found["nothing"], found["step"]) == (b"\xff", None, (1, [2.5, "é"]))
    assert same(found["storage"], torch.arange(5)) and same(found["raw_storage"], torch.ones(2).view(torch.uint8))
    assert found["version"] == str(torch.__version__) and type(found["version"]) is str


def test_a_module_pickled_whole_is_a_record() -> None:
    for new in (True, False):
        found = read(saved(nn.Linear(2, 3), new=new))
        assert type(found) is Record and found.name == "torch.nn.modules.linear.Linear"
        assert found.get("_parameters")["weight"].shape == (3, 2)


def test_pickles_without_a_container() -> None:
    tensor, parameter = torch.randn(3, 4), nn.Parameter(torch.randn(5))
    found = load_pickle(pickle.dumps({"t": tensor.t(), "p": parameter, "s": tensor.storage()}), WHERE)
    assert same(found["t"], tensor.t()) and same(found["p"], parameter) and same(found["s"], tensor.reshape(-1))
    ((_, stretch),) = found["p"].pieces
    assert stretch.source.path == WHERE


def test_a_stretch_of_something_larger() -> None:
    for new in (True, False):
        inner = saved({"a": torch.arange(5)}, new=new)
        outer = Memory(WHERE, b"before" + inner + b"after")
        found = load_file(torch_files.Stretch(outer, 6, len(inner)))
        assert same(found["a"], torch.arange(5))


# Old and odd containers

VERSIONS = GOLDEN / "torch_versions"


@pytest.mark.parametrize("path", sorted(VERSIONS.glob("*.pt")), ids=lambda path: path.stem)
def test_files_of_many_torches(path: Path) -> None:
    found = load_path(LocalPlace(path))
    model, values = found["model"], found["values"]
    base = torch.arange(12.0).reshape(3, 4) / 4
    expected = {
        "base": base, "turned": base.t(), "inner": base[1:, ::2], "wide": base[:, :1].expand(3, 5),
        "number": torch.tensor(7), "empty": torch.zeros(0, 3), "parameter": base[1], "half": base.half(),
        "double": base.double(), "bytes": torch.arange(5).byte(), "bool": base > 1, "bfloat16": base.bfloat16(),
        "complex": torch.complex(base, base + 1), "conjugate": torch.complex(base, -base - 1),
        "uint16": torch.arange(5).to(torch.uint16), "float8": torch.arange(5).to(torch.float8_e4m3fn),
    }  # fmt: skip
    assert len(model) >= 10
    for name in model:
        assert same(model[name], expected[name]), name
    assert all(isinstance(tensor, Opaque) for tensor in found["left"].values())
    assert values["args"].get("lr") == 0.5 and values["args"].get("name") == "x" and values["set"] == {1, 2}
    assert (values["step"], values["raw"], values["list"]) == (3, b"\xff\xfe", [1, None])
    assert same(model["turned"], model["base"].read().t())
    if "zip" in path.stem:
        assert all(s.member is not None for t in (model["base"], model["half"]) for _, s in t.pieces)


@pytest.mark.parametrize("path", sorted(VERSIONS.glob("*.pkl")), ids=lambda path: path.stem)
def test_pickles_of_many_torches(path: Path) -> None:
    assert same(load_pickle(path.read_bytes(), path), torch.arange(12.0).reshape(3, 4) / 4)


def test_views_of_storages_in_the_old_container() -> None:
    # torch before 0.4 told parts of storages by themselves; today's never does.
    base = torch.arange(10.0)
    data = saved(base, new=False)
    key = data[data.index(b"X", data.index(b"FloatStorage")) + 5 :].split(b"q")[0]
    name = b"X" + struct.pack("<I", len(key)) + key
    seen = data.index(b"K\nN", data.index(key))  # ten elements, no view
    view = data[: seen + 2] + b"(" + name.replace(key[-1:], b"v") + b"K\x03K\x04t" + data[seen + 3 :]
    size = view.index(b"K\n\x85")
    whole_view = view[:size] + b"K\x04\x85" + view[size + 3 :]
    theirs = torch.load(io.BytesIO(whole_view), weights_only=False)
    assert theirs.tolist() == [3, 4, 5, 6]
    assert same(read(whole_view), theirs)


def test_what_torch_1_4_called_its_storages() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved([torch.arange(5)]))) as theirs, zipfile.ZipFile(target, "w") as ours:
        for name in theirs.namelist():
            ours.writestr(name.replace("/data/", "/tensors/"), theirs.read(name))
    assert same(read(target.getvalue())[0], torch.arange(5))


def test_a_checkpoint_that_was_zipped_again() -> None:
    state, target = {"a": torch.arange(10_000), "b": torch.zeros(0)}, io.BytesIO()
    source = io.BytesIO(saved(state))
    with zipfile.ZipFile(source) as theirs, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as ours:
        for name in theirs.namelist():
            ours.writestr(name, theirs.read(name))
    found = read(target.getvalue())
    assert same(found["a"], state["a"]) and same(found["b"], state["b"])


def test_functions_of_older_torches() -> None:
    array = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    numpy = pickle.dumps(array.numpy(), 2)[:-1]
    for function in ("_rebuild_xla_tensor", "_rebuild_device_tensor_from_numpy"):
        for dtype in (torch.float32, torch.bfloat16):
            data = b"ctorch._utils\n" + function.encode() + b"\n(" + numpy[2:] + b"ctorch\n" + str(dtype)[6:].encode()
            found = load_pickle(b"\x80\x02" + data + b"\nX\x05\x00\x00\x00xla:0\x89tR.", WHERE)
            assert same(found, array.to(dtype)), (function, dtype)
    tensor = pickle.dumps(array, 2)[2:-1]
    called = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + tensor
    assert same(load_pickle(called + b"ctorch\nfloat32\nX\x03\x00\x00\x00xla\x89tR.", WHERE), array)
    assert isinstance(load_pickle(called + b"ctorch\nbfloat16\nX\x03\x00\x00\x00xla\x89tR.", WHERE), Opaque)
    for kept in (b"ctorch.nn.parameter\nParameter\n", b"ctorch.autograd.variable\nVariable\n"):
        assert same(load_pickle(kept + b"(" + tensor + b"tR(\x88\x89}tb.", WHERE), array)
    assert same(load_pickle(b"ctorch.tensor\n_rebuild_from_type\n(" + _parts_of(array) + b"tR.", WHERE), array)
    assert isinstance(load_pickle(b"ctorch\nFloatTensor\n)RN)\x86b.", WHERE), Opaque)


def _parts_of(tensor: torch.Tensor) -> bytes:
    """Function, class, arguments and attributes, as torch 1.7 pickles them for a subclass."""
    function, args = tensor.__reduce_ex__(2)
    return b"ctorch._utils\n" + function.__name__.encode() + b"\nctorch\nTensor\n" + pickle.dumps(args, 2)[2:-1] + b"}"


def test_files_of_2016_are_refused() -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name))
    data = all_of(Memory(WHERE, target.getvalue()))
    assert is_torch_file(data)
    with pytest.raises(Unsupported, match="2016"):
        load_file(data)
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w:") as archive:
        archive.addfile(tarfile.TarInfo("composer_states.pt"))
    assert not is_torch_file(all_of(Memory(WHERE, other.getvalue())))


def test_what_is_a_file_of_torch() -> None:
    for protocol in (1, 2, 3, 4, 5):
        for new in (True, False):
            assert is_torch_file(all_of(Memory(WHERE, saved([1], new=new, protocol=protocol))))
    for data in (b"", b"x", b"\x80\x02N.", bytes(1000), b"\x89HDF", pickle.dumps([1])):
        assert not is_torch_file(all_of(Memory(WHERE, data)))
        with pytest.raises(Damaged, match="no file of torch.save"):
            read(data)


def test_programs_other_archives_and_other_machines(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
    with pytest.raises(Unsupported, match="TorchScript"):
        load_path(tmp_path / "program.pt")
    for members, match in (
        ({"x/data.npy": b"1"}, "none of torch.save: it holds x/data.npy"),
        ({}, "none of torch.save: it holds nothing"),
        ({"x/data.pkl": b"N.", "x/byteorder": b"big"}, "big-endian"),
        ({"x/data.pkl": b"N.", "x/byteorder": b"l" * 1000}, "big-endian"),
        ({"x/data.pkl": b"N.", "y/data.pkl": b"N."}, "none of torch.save"),
    ):
        with pytest.raises(Unsupported, match=match):
            read(_zipped(members))
    big = bytearray(saved([torch.zeros(2)], new=False))
    at = big.index(b"\x88", big.index(b"little_endian"))
    big[at : at + 1] = b"\x89"
    with pytest.raises(Unsupported, match="big-endian"):
        read(bytes(big))
    with pytest.raises(FileNotFoundError):
        load_path(tmp_path / "missing.pt")
    with pytest.raises(StorageError, match="no regular file"):
        load_path(tmp_path)


def _zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target.getvalue()


# Damage and malice


@BOTH
def test_truncated_anywhere(new: bool) -> None:
    data = saved({"a": torch.arange(20), "b": "é" * 100}, new=new)
    for length in range(len(data)):
        with pytest.raises(Damaged, match=str(WHERE)):
            read(data[:length])


def test_long_pickles_in_the_old_container(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its pickles have no length: more and more of the file is read until they end; what is damaged is not read on.
    value = {"text": "é" * 3_000_000, "a": torch.arange(1000)}
    data = saved(value, new=False)
    found = read(data)
    assert found["text"] == value["text"] and same(found["a"], value["a"])
    reads: list[int] = []
    plain_read = Memory.read
    monkeypatch.setattr(Memory, "read", lambda self, b, n: reads.append(n) or plain_read(self, b, n))
    broken = data.replace(b"X\x04\x00\x00\x00text", b"\xff\x04\x00\x00\x00text")
    with pytest.raises(Damaged):
        read(broken)
    assert max(reads) <= 1 << 20


def test_storages_that_contradict_the_pickle() -> None:
    data = saved([torch.arange(5), torch.ones(3)], new=False)
    at = data.rindex(struct.pack("<q", 5) + bytes(8) + struct.pack("<q", 1))
    wrong = [
        data[:at] + struct.pack("<q", 4) + data[at + 8 :], data[:at] + struct.pack("<q", -1) + data[at + 8 :],
        data.replace(b"K\x05", b"K\x06"), data[:-1],
        data.replace(b"storage", b"stirage"), data.replace(b"LongStorage", b"NoneStorage"),
    ]  # fmt: skip
    for one in wrong:
        assert one != data
        with pytest.raises((Damaged, Unsupported), match=str(WHERE)):
            read(one)
    zipped = saved([torch.arange(5)])
    for old, new in ((b"K\x05", b"K\x06"), (b"storage", b"stirage"), (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001")):
        assert old in zipped
        with pytest.raises(Damaged, match=str(WHERE)):
            read(zipped.replace(old, new, 1))


def _pickled(pickle_of_tensor: bytes) -> bytes:
    return _zipped({"x/data.pkl": pickle_of_tensor, "x/data/0": bytes(400)})


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x64tQ"


def _tensor(*args: bytes, function: bytes = b"ctorch._utils\n_rebuild_tensor_v2\n") -> bytes:
    return _pickled(b"\x80\x02" + function + b"(" + b"".join(args) + b"tR.")


def test_tensors_that_contradict_their_storage() -> None:
    hooks = b"\x89}"
    good = read(_tensor(STORAGE, b"K\x00", b"K\x64\x85", b"K\x01\x85", hooks))
    assert good.shape == (100,)
    wrong = [
        (STORAGE, b"K\x01", b"K\x64\x85", b"K\x01\x85", hooks), (STORAGE, b"K\x00", b"K\x65\x85", b"K\x01\x85", hooks),
        (STORAGE, b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85", hooks),
        (STORAGE, b"K\x00", b"N\x85", b"K\x01\x85", hooks),
        (STORAGE, b"K\x00", b"K\x02K\x02\x86", b"K\x01\x85", hooks), (STORAGE, b"K\x00", b"N", b"N", hooks),
        (STORAGE, b"N", b"K\x01\x85", b"K\x01\x85", hooks), (b"N", b"K\x00", b"K\x01\x85", b"K\x01\x85", hooks),
        (STORAGE, b"K\x00"), (STORAGE, b"K\x00", b"(" + b"K\x01" * 100 + b"t", b"(" + b"K\x01" * 100 + b"t", hooks),
        (STORAGE, b"K\x00", b"\x8a\x0a" + b"\x01" * 10 + b"\x85", b"K\x01\x85", hooks),
    ]  # fmt: skip
    for args in wrong:
        with pytest.raises(Damaged, match=str(WHERE)):
            read(_tensor(*args))
    noted = b"}X\x04\x00\x00\x00conj\x88s"
    for metadata in (noted, b"}X\x05\x00\x00\x00other\x88s", b"K\x01"):  # of real numbers there is no conjugate
        found = read(_tensor(STORAGE, b"K\x00", b"K\x64\x85", b"K\x01\x85", hooks, metadata))
        if metadata != noted:
            assert isinstance(found, Opaque)


FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
WRONG_CALLS = {
    "no function": (FROM_TYPE, b"K\x01ctorch\nTensor\n)}"),
    "another function": (FROM_TYPE, b"ctorch\nSize\nctorch\nTensor\n)}"),
    "a function that is not read": (FROM_TYPE, b"ctorch.functional\neinsum\nctorch\nTensor\n)}"),
    "itself": (FROM_TYPE, FROM_TYPE + b"ctorch\nTensor\n)}"),
    "no class": (FROM_TYPE, b"ctorch._utils\n_rebuild_tensor_v2\nN)}"),
    "no arguments": (FROM_TYPE, b"ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n]}"),
    "a size of texts": (b"ctorch\nSize\n", b"X\x01\x00\x00\x00a\x85"),
    "a size of sizes": (b"ctorch\nSize\n", b"K\x01\x85\x85"),
    "two sizes": (b"ctorch\nSize\n", b"K\x01\x85K\x01\x85"),
    "a device of a number": (b"ctorch\ndevice\n", b"K\x01"),
    "a device of no number": (b"ctorch\ndevice\n", b"X\x03\x00\x00\x00cpuX\x03\x00\x00\x00cpu"),
    "a version of a number": (b"ctorch.torch_version\nTorchVersion\n", b"K\x01"),
    "a layout of a number": (b"ctorch.serialization\n_get_layout\n", b"K\x01"),
    "a wrapper of no class": (b"ctorch._utils\n_rebuild_wrapper_subclass\n", b"NNN"),
    "a wrapper of no size": (b"ctorch._utils\n_rebuild_wrapper_subclass\n", b"ctorch\nX\nctorch\nfloat32\nN"),
    "bytes of a text": (b"ctorch.storage\n_load_from_bytes\n", b"X\x01\x00\x00\x00a"),
    "bytes of nothing": (b"ctorch.storage\n_load_from_bytes\n", b"C\x00"),
    "an array of nothing": (b"ctorch._utils\n_rebuild_xla_tensor\n", b"Nctorch\nfloat32\nN\x89"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_functions_called_with_something_else(name: str) -> None:
    function, args = WRONG_CALLS[name]
    with pytest.raises(Damaged, match=str(WHERE)):
        read(_tensor(args, function=function))


def test_files_within_files_within_files() -> None:
    inner = pickle.dumps(torch.ones(2).storage(), 2)  # calls torch.storage._load_from_bytes
    assert same(load_pickle(inner, WHERE), torch.ones(2))
    for _ in range(2):
        data = saved(1, new=False)[: -len(pickle.dumps([], 2))]
        data = data[: data.rindex(b"\x80\x02K\x01.")] + inner + pickle.dumps([], 2)
        inner = b"\x80\x02ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(data)) + data + b"tR."
    found = load_pickle(inner, WHERE)
    assert type(found) is Record  # not followed: torch never writes such


def test_a_pickle_that_unpacks_to_far_more_than_its_file() -> None:
    data = _zipped({"x/data.pkl": b"]" + b"]0" * 1_000_000 + b"."}, zipfile.ZIP_DEFLATED)
    assert len(data) < 5000
    with pytest.raises(Damaged, match="its pickle claims 2000002 bytes, the file has"):
        read(data)


@pytest.mark.parametrize("name", hostile.REFUSED)
@BOTH
def test_what_is_refused(name: str, new: bool) -> None:
    pickled = b"\x80\x02" + hostile.REFUSED[name] + b"."
    if new:
        data = _zipped({"x/data.pkl": pickled})
    else:
        data = saved(1, new=False)
        data = data[: data.rindex(b"\x80\x02K\x01.")] + pickled + pickle.dumps([], 2)
    with hostile.listening() as heard, pytest.raises(Unsupported, match="nothing was executed"):
        read(data)
    assert heard == []


def _seeds() -> list[bytes]:
    paths = sorted(GOLDEN.glob("torchsave*/ckpt/*"))[:4] + sorted(GOLDEN.glob("olmo_torch_legacy*/ckpt/*.pt"))[:1]
    found = [path.read_bytes() for path in paths]
    for new in (True, False):
        odd = {"a": torch.randn(5, 6).t(), "b": [torch.ones(3).conj(), torch.eye(2).to_sparse()], "c": _quantized()}
        found.append(saved(odd, new=new))
    return found


SEEDS = _seeds()


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(st.sampled_from(range(len(SEEDS))), st.data())
def test_mutated_files(seed: int, draw: st.DataObject) -> None:
    data = SEEDS[seed]
    altered = bytearray(data)
    # Pickle and headers lie in the first kilobytes and at the end; between them are only numbers.
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, min(8000, len(data) - 1)) | st.integers(max(0, len(data) - 2000), len(data) - 1))
        altered[at : at + draw.draw(st.integers(0, 5))] = draw.draw(st.binary(max_size=6))
    with hostile.listening() as heard:
        try:
            _read_all(read(bytes(altered)), 100)
        except (Damaged, Unsupported) as error:
            assert str(WHERE) in str(error)
    assert not [event for event in heard if not event.startswith("open") and "tmp" not in event]


def _read_all(node: Any, depth: int) -> None:
    if isinstance(node, Stored):
        if node.fault() is None:
            node.read()
    elif isinstance(node, (dict, list, tuple)) and depth:
        for inner in node.values() if isinstance(node, dict) else node:
            _read_all(inner, depth - 1)
