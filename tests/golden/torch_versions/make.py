"""Writes the files of this folder: one state, saved by each torch from 1.0 on and by its Python 2, in each container.

Run it with the torch in question: ``python make.py FOLDER``. It knows nothing newer than torch 1.0 and Python 2.7.
"""

import argparse
import collections
import os
import pickle
import sys

import torch

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def state():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 4
    parameter = torch.nn.Parameter(base[1].clone())
    parameter.note = "an attribute"
    found = collections.OrderedDict(
        [
            ("base", base),
            ("turned", base.t()),
            ("inner", base[1:, ::2]),
            ("wide", base[:, :1].expand(3, 5)),
            ("number", torch.tensor(7)),
            ("empty", torch.zeros(0, 3)),
            ("parameter", parameter),
            ("half", base.half()),
            ("double", base.double()),
            ("bytes", torch.arange(5).byte()),
        ]
    )
    if VERSION >= (1, 2):
        found["bool"] = base > 1
        found["bfloat16"] = base.bfloat16()
    if VERSION >= (1, 7):
        found["complex"] = torch.complex(base, base + 1)
    if VERSION >= (2, 0):
        found["conjugate"] = torch.complex(base, base + 1).conj()  # torch 1.11 and 1.12 did not note it
    if VERSION >= (2, 3):
        found["uint16"] = torch.arange(5).to(torch.uint16)
        found["float8"] = torch.arange(5).to(torch.float8_e4m3fn)
    left = {"sparse": torch.eye(2).to_sparse()} if VERSION >= (1, 1) else {}
    if VERSION >= (1, 4):
        left["quantized"] = torch.quantize_per_tensor(base, 0.5, 1, torch.qint8)
    values = {"args": argparse.Namespace(lr=0.5, name="x"), "set": {1, 2}, "step": 3}
    values.update({"raw": b"\xff\xfe", "list": [1, None]})
    return {"model": found, "left": left, "values": values}


def main(folder):
    name = "torch" + ".".join(map(str, VERSION)) + ("-python2" if sys.version_info[0] == 2 else "")
    saved = state()
    if VERSION < (1, 4):
        torch.save(saved, os.path.join(folder, name + ".pt"))
    else:
        for kind, new in (("zip", True), ("legacy", False)):
            path = os.path.join(folder, name + "-" + kind + ".pt")
            torch.save(saved, path, _use_new_zipfile_serialization=new)
    with open(os.path.join(folder, name + ".pkl"), "wb") as target:
        pickle.dump(saved["model"]["base"], target, 2)  # a storage that is a file within


if __name__ == "__main__":
    main(sys.argv[1])
