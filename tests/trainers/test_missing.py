"""An integration without its framework says which package to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "framework"), [("huggingface", "transformers"), ("accelerate", "accelerate"), ("peft", "peft")]
)
def test_a_missing_framework_is_named(monkeypatch, module, framework):
    monkeypatch.delitem(sys.modules, f"holdfast.trainers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=rf"needs {framework}: pip install"):
        importlib.import_module(f"holdfast.trainers.{module}")
