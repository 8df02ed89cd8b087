"""The package `grps_framework`, as projects import it. The package exists only after `install`."""

import importlib
import sys
from types import ModuleType
from typing import NoReturn

_HERE = "shmserve.grps.executor"
_MODULES = {
    "apis.grps_pb2": "shmserve._generated.grps_pb2",
    "context.context": f"{_HERE}.context",
    "converter.converter": f"{_HERE}.converter",
    "converter.torch_tensor_converter": f"{_HERE}.torch_inferer",
    "model_infer.inferer": f"{_HERE}.inferer",
    "model_infer.torch_inferer": f"{_HERE}.torch_inferer",
    "logger.logger": f"{_HERE}.logger",
    "monitor.monitor": "shmserve.executor.monitor",
    "test": f"{_HERE}.project_test",
}
_REFUSED = {
    "model_infer.tf_inferer": "TensorFlow",
    "model_infer.trt_inferer": "TensorRT",
    "converter.tf_tensor_converter": "TensorFlow",
    "converter.trt_tensor_converter": "TensorRT",
}


class _Refused(ModuleType):
    """A module for an unsupported library: importable, but every attribute raises ImportError."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name)
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self._what} models of GRPS projects are not supported")


def install() -> None:
    """Make `grps_framework` importable in this process."""
    _package("grps_framework")
    for name, target in _MODULES.items():
        _put(f"grps_framework.{name}", importlib.import_module(target))
    for name, what in _REFUSED.items():
        _put(f"grps_framework.{name}", _Refused(f"grps_framework.{name}", what))


def _put(name: str, module: ModuleType) -> None:
    parent, _, own = name.rpartition(".")
    setattr(_package(parent), own, module)
    sys.modules[name] = module


def _package(name: str) -> ModuleType:
    package = sys.modules.get(name)
    if package is None:
        package = ModuleType(name)
        package.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(_package(parent), own, package)
        sys.modules[name] = package
    return package
