"""Print the names that the fake of CUDA offers, as JSON: qualified name to parameters."""

import dataclasses
import inspect
import json
import types
from typing import Any

import cupy
import pynvml

CUDA = cupy.cuda
PARTS = (CUDA.device, CUDA.driver, CUDA.memory, CUDA.runtime, CUDA.stream)
PACKAGES = (cupy, cupy.cuda, pynvml)
OF_PYTHON = {*dir(dataclasses.make_dataclass("Empty", [])), "__annotations__", "__del__"}


def is_own(module: types.ModuleType, name: str, value: Any) -> bool:
    """Return True if the module offers the name on purpose, not as an import for internal use."""
    home = getattr(value, "__module__", None) or module.__name__
    if name.startswith("_") or isinstance(value, types.ModuleType):
        return False
    if module in PARTS:
        return home in (module.__name__, "cupy._fake", "cupy._ipc")
    return home.split(".")[0] in ("cupy", "pynvml", "numpy")


def parameters(value: Any) -> list[str]:
    """Return the parameters that callers may give by keyword."""
    if not isinstance(value, types.FunctionType):
        return []
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(value).parameters.values()
    return [p.name for p in found if p.kind in keywords and p.name != "self"]


told: dict[str, list[str]] = {}
for module in PACKAGES + PARTS:
    for name, value in vars(module).items():
        if not is_own(module, name, value):
            continue
        path = f"{module.__name__}.{name}"
        told[path] = parameters(value)
        if isinstance(value, type) and value.__module__.startswith("cupy"):
            for attribute in set(dir(value)) - OF_PYTHON:
                dunder = attribute.startswith("__")
                if dunder or not attribute.startswith("_"):
                    keywords = [] if dunder else parameters(getattr(value, attribute))
                    told[f"{path}.{attribute}"] = keywords
print(json.dumps(told))
