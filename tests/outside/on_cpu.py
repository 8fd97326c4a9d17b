"""torch's own distributed tests on a machine without an accelerator: a pytest plugin, for torch and for holdfast.

They are written for 2 to 4 GPUs. Here their ranks are forked processes, so that what is replaced before the fork is
replaced in them too; every process group is one of gloo; a device that is a number or a GPU is the CPU; and what asks
for GPUs is told that there are some. Nothing of torch.distributed.checkpoint is touched.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.remote_device import _remote_device
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")
GPUS = 4


def on_cpu(value: Any) -> Any:
    """The CPU in the place of a GPU, or of a GPU's number."""
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class OnCpu(TorchFunctionMode):
    """Whatever a call is told of devices is the CPU; ``cuda()`` gives the tensor back."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        return function(*map(on_cpu, args), **kwargs)


def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """In the place of a decorator that skips a test."""
    return lambda test: test


def with_gloo(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` for gloo, whatever is asked for."""

    @functools.wraps(begin)
    def began(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return begin("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

    return began


def forked(self: Any) -> None:
    """In the place of `_spawn_processes`."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def placed(make: Callable[..., None]) -> Callable[..., None]:
    """A place like rank:0/cuda:0 is rank:0/cpu."""

    @functools.wraps(make)
    def made(self: Any, place: Any) -> None:
        rank, _, device = str(place).partition("/")
        make(self, f"{rank}/cpu" if device else place)

    return made


def wrapped(make: Callable[..., None]) -> Callable[..., None]:
    """FSDP, which looks for an accelerator unless it is told of a device."""

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{"device_id": CPU, **kwargs})

    return made


for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
    setattr(common_distributed, name, as_it_is)
common_distributed.MultiProcessTestCase._spawn_processes = forked
dist.init_process_group = with_gloo(dist.init_process_group)
_remote_device.__init__ = placed(_remote_device.__init__)  # type: ignore[method-assign]
FullyShardedDataParallel.__init__ = wrapped(FullyShardedDataParallel.__init__)  # type: ignore[method-assign]
torch.cuda.device_count = lambda: GPUS
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda *_: None
torch.accelerator.device_count = lambda: GPUS
torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]

from torch.testing._internal import common_fsdp  # noqa: E402 - they take what stands above
from torch.testing._internal.distributed._shard import sharded_tensor  # noqa: E402
from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: E402


@functools.wraps(device_mesh.init_device_mesh)
def meshed(kind: str, *args: Any, **kwargs: Any) -> Any:
    """A mesh of the CPU, whatever is asked for."""
    return meshed.__wrapped__("cpu", *args, **kwargs)


def begin(self: Any, *_: Any, **__: Any) -> None:
    """In the place of `init_pg`, which accepts a GPU's backend only where there is a GPU."""
    dist.init_process_group("gloo", world_size=self.world_size, rank=self.rank, init_method=f"file://{self.file_name}")


common_dtensor.DTensorTestBase.init_pg = begin
sharded_tensor.with_comms = functools.partial(sharded_tensor.with_comms, backend="gloo")
common_fsdp.DEVICE_COUNT = GPUS
for module in list(sys.modules.values()):
    if vars(module).get("init_device_mesh") is meshed.__wrapped__:
        vars(module)["init_device_mesh"] = meshed
OnCpu().__enter__()
shutil.rmtree("/tmp/dcp_testing", ignore_errors=True)  # one test saves there, and leaves it to the next run
