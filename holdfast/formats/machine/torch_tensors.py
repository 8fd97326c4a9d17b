"""What torch's functions would make of a pickle's arguments: unread storages and tensors, sizes, devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.formats.machine import arrays
from holdfast.formats.machine.pickles import Calls, Name, Record
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Opaque, Stored, of_bytes, strided
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import whole
from holdfast.storage.place import Place

_LIMIT = 1 << 63

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64", "Untyped": "uint8", "_Untyped": "uint8",
    # Quantized: as their bytes, of which no tensor is made.
    "QInt8": "int8", "QUInt8": "uint8", "QInt32": "int32", "QUInt4x2": "uint8", "QUInt2x4": "uint8",
}  # fmt: skip


@dataclass(frozen=True)
class Storage(Stored):
    """A storage, as a tensor of all its elements: ``dtype`` that of its type, ``stretch`` its bytes."""

    stretch: Stretch


def _storage(dtype: str, stretch: Stretch) -> Storage:
    numel = stretch.nbytes // dtypes.itemsize(dtype)
    return Storage(dtype, (numel,), ((whole((numel,)), stretch),) if numel else (), stretch)


def _storage_id(key: Any, where: Place) -> tuple[str, str, int, Any]:
    """Dtype, key, number of elements and what follows, of a persistent id."""
    if not isinstance(key, tuple) or len(key) < 5 or key[0] not in ("storage", b"storage"):
        raise ValueError("a persistent id that is no storage")
    if not isinstance(key[1], Name) or not isinstance(key[2], str) or not isinstance(key[4], int):
        raise ValueError("a storage without type, key or size")
    kind = key[1].text.rpartition(".")[2].removesuffix("Storage")
    if kind not in _STORAGES:
        raise Unsupported(f"{where} has a storage of type {key[1].text}, which is not read; save it again by torch")
    dtype = _STORAGES[kind]
    if not 0 <= key[4] < 1 << 60:
        raise ValueError("a storage of no size")
    return dtype, key[2], key[4], key[5] if len(key) > 5 else None


def zip_storage(key: Any, storage: Callable[[str, int], Stretch], where: Place) -> Storage:
    """What a persistent id of the zip container stands for; ``storage`` finds a key's bytes, so many at least."""
    dtype, name, numel, _ = _storage_id(key, where)
    return _storage(dtype, storage(name, numel * dtypes.itemsize(dtype)))


def legacy_storage(key: Any, storage: Callable[[str, int, int], Stretch], where: Place) -> Any:
    """What one of the container before it stands for; ``storage`` finds a key's bytes, so many of so wide elements."""
    if isinstance(key, tuple) and len(key) == 4 and key[0] in ("module", b"module"):
        return key[1]  # a module's class, with its source code
    dtype, name, numel, view = _storage_id(key, where)
    size = dtypes.itemsize(dtype)
    root = storage(name, numel * size, size)
    if view is not None and root.nbytes:
        _, offset, length = view
        root = root.part(offset * size, length * size)
    return _storage(dtype, root)


def _tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any = None, hooks: Any = None,
    metadata: Any = None,
) -> Any:  # fmt: skip
    return _view(getattr(storage, "dtype", ""), storage, offset, size, stride, metadata)


def _tensor_v3(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    # Over bytes: the types that have no storage class of their own.
    return _view(_dtype(dtype), storage, offset, size, stride, metadata)


_SIGNED = (torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128)


def _view(dtype: str, storage: Any, offset: int, size: Any, stride: Any, metadata: Any) -> Any:
    if not isinstance(storage, Storage):
        raise TypeError(f"a tensor over a {type(storage).__name__}")
    if not dtypes.known(dtype):
        return Opaque(f"it is of type {dtype[:60]}, which this torch does not have; a newer one may")
    flags = metadata or {}
    signed = dtypes.torch_dtype(dtype) in _SIGNED
    if not isinstance(flags, dict) or not flags.keys() <= {"conj", "neg"} or (flags and not signed):
        return Opaque("torch noted something about it that holdfast does not know; save it again as a plain tensor")
    conj, neg = bool(flags.get("conj")), bool(flags.get("neg"))
    try:
        return strided(dtype, size, stride, storage.stretch, offset, conj=conj, neg=neg)
    except Unsupported as error:
        return Opaque(str(error))


def _dtype(value: Any) -> str:
    if not isinstance(value, Name):
        raise TypeError(f"a {type(value).__name__} as dtype")
    return value.text.removeprefix("torch.")


def _opaque(what: str) -> Callable[..., Opaque]:
    reason = f"it is {what}; save it again as a plain tensor, or in parts"
    return lambda *_: Opaque(reason)


def _meta(*_: Any) -> Opaque:
    return Opaque("it lies on the meta device: it has a shape, but no data")


def _from_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    if isinstance(data, Stored) and data.dtype != _dtype(dtype):
        return Opaque(f"it is kept as {data.dtype}, but was {_dtype(dtype)} on its device")
    return data


def _from_numpy(where: Place, data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    # NumPy lacks some types: what was bfloat16 is kept as float32, and goes back without loss.
    name = _dtype(dtype)
    array = arrays.array_of(data, where) if arrays.is_array(data) else None
    if not isinstance(array, Stored) or not dtypes.known(name):
        raise TypeError(f"a tensor of a {type(data).__name__}")
    if array.dtype == name:
        return array
    values = array.read().to(dtypes.torch_dtype(name))
    return of_bytes(name, array.shape, bytes(values.reshape(-1).view(torch.uint8).tolist()), where)


_PLAIN = frozenset(
    ["torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
)


def _from_type(
    where: Place, calls: Calls, seen: set[str], function: Any, cls: Any, args: Any, state: Any = None
) -> Any:
    if not isinstance(function, Name) or "._rebuild_" not in function.text or function.text not in calls:
        raise TypeError("a tensor made by no function that makes tensors")
    if not isinstance(cls, Name) or not isinstance(args, tuple):
        raise TypeError("a tensor of no class")
    tensor = calls[function.text](*args)
    if isinstance(tensor, Record):
        both = isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state)
        tensor.state = {**(state[0] or {}), **(state[1] or {})} if both else state  # attributes and slots
    elif isinstance(tensor, Stored) and cls.text not in _PLAIN and cls.text not in seen:
        seen.add(cls.text)
        log.info("%s: a %s is read as the plain tensor that it holds; its attributes are not kept", where, cls.text)
    return tensor


def _wrapper(cls: Any, dtype: Any, size: Any, *_: Any) -> Record:
    if not isinstance(cls, Name):
        raise TypeError("a tensor of no class")
    return Record(cls.text, (_dtype(dtype), _size(size)))


def _size(sizes: Any = ()) -> torch.Size:
    if not isinstance(sizes, (tuple, list)):
        raise TypeError(f"a size of a {type(sizes).__name__}")
    size = torch.Size(sizes)  # which takes nothing but integers
    if sizes and not -_LIMIT <= min(sizes) <= max(sizes) < _LIMIT:  # torch takes them, and then cannot even print them
        raise ValueError("a size beyond all memory")
    return size


def _device(kind: Any, index: Any = None) -> Any:
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        raise TypeError("a device of no name")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:  # of an accelerator that this torch has never heard of
        return kind if index is None else f"{kind}:{index}"


def _same(value: Any, *_: Any) -> Any:
    return value


def _version(text: Any, *_: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a version of a {type(text).__name__}")
    return text


_CALLS: Calls = {
    **arrays.CALLS,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_nested_tensor": _opaque("a nested tensor"),
    "torch._utils._rebuild_qtensor": _opaque("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _opaque("a sparse tensor"),
    "torch._utils._rebuild_sparse_csr_tensor": _opaque("a sparse tensor"),
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch.nested._internal.nested_tensor._rebuild_njt": _opaque("a nested tensor"),
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: Name(_version(name)),
    "torch.torch_version.TorchVersion": _version,
    "torch.nn.parameter.UninitializedParameter": _meta,
    "torch.nn.parameter.UninitializedBuffer": _meta,
    # Before torch 0.4 these held a tensor; before 0.1.11 a tensor was made empty and then given its state.
    "torch.autograd.variable.Variable": _same,
    "torch.nn.parameter.Parameter": _same,
    **{f"torch.{cuda}{kind}Tensor": _opaque("a tensor of torch 0.1") for cuda in ("", "cuda.") for kind in _STORAGES},
}


def calls(where: Place) -> Calls:
    """Functions of ours for the names that torch's files hold; ``where`` is named in errors."""
    functions: Calls = {
        **_CALLS,
        "torch._utils._rebuild_device_tensor_from_numpy": partial(_from_numpy, where),
        "torch._utils._rebuild_xla_tensor": partial(_from_numpy, where),
    }
    from_type = partial(_from_type, where, functions, set())
    return {
        **functions,
        "torch._tensor._rebuild_from_type": from_type,
        "torch._tensor._rebuild_from_type_v2": from_type,
    }
