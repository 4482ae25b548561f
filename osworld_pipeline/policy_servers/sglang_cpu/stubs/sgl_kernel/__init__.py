"""A stub of sglang's CUDA kernels for a CPU: any name can be imported, and calling it raises an error.

sglang imports the package in many places, but on a CPU with torch's own attention it almost never calls a kernel.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253 - another environment than the pipeline's

__version__ = "0.4.10"
"""sglang compares it with its minimum version."""
PREFIX = f"{__name__}."


class _Missing:
    """A kernel that can be imported, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a CUDA kernel: this sglang serves on a CPU")

    def __getattr__(self, name: str) -> "_Missing":
        return _missing(f"{self._name}.{name}")


def _missing(name: str) -> _Missing:
    # Inspection (copy, pickle, inspect) looks up dunder names, which must not exist.
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


def __getattr__(name: str) -> _Missing:
    return _missing(f"{PREFIX}{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        return _missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith(PREFIX) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _sigmoid_mul(values: torch.Tensor, gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return values * torch.sigmoid(gate)


class _Operators:
    """torch.ops.sgl_kernel. Only fused CPU operators exist, without `fused_qk_norm_cpu`, which would indicate AMX."""

    def __getattr__(self, name: str) -> Any:
        if name == "fused_sigmoid_mul_cpu":
            return _sigmoid_mul
        if name == "fused_qk_norm_cpu" or not (name.startswith("fused_") and name.endswith("_cpu")):
            raise AttributeError(name)
        return _missing(f"torch.ops.sgl_kernel.{name}")


sys.meta_path.append(_Finder())
torch.ops.sgl_kernel = _Operators()
