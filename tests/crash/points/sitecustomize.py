"""Makes a process kill itself at a named point; on the path of servers of crash tests only.

CRASH_POINT is ``module:function[:n]``: at the n-th call of that function, before it does
anything, the process gets SIGKILL, if it can take the file CRASH_FLAG away. So exactly one
process dies, and those that are started in its place live.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys

MODULE, FUNCTION, COUNT = (os.environ.get("CRASH_POINT", "::") + "::").split(":")[:3]


def armed(function):
    left = [int(COUNT or 1)]

    def wrapper(*args, **kwargs):
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


def arm(module):
    owner = module
    *path, name = FUNCTION.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, armed(getattr(owner, name)))


class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        arm(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = Loader(spec.loader)
        return spec


if MODULE:
    sys.meta_path.insert(0, Finder())
