"""Make a process kill itself at a named point; only on the path of servers of crash tests.

CRASH_POINT is ``module:function[:n]``. At the start of the n-th call of that function the process
gets SIGKILL, provided it can remove the file CRASH_FLAG. So exactly one process dies, and
replacements live.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE, FUNCTION, COUNT = (os.environ.get("CRASH_POINT", "::") + "::").split(":")[:3]


def armed(function: Callable[..., Any]) -> Callable[..., Any]:
    left = [int(COUNT or 1)]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            try:
                os.unlink(os.environ["CRASH_FLAG"])
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapper


def arm(module: ModuleType) -> None:
    owner: Any = module
    *path, name = FUNCTION.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, armed(getattr(owner, name)))


class Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        arm(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = Loader(spec.loader)
        return spec


if MODULE:
    sys.meta_path.insert(0, Finder())
