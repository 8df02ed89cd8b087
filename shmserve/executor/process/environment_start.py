"""First program in a model's environment: ``PYTHON -I environment_start.py SERVER_PYTHON MODULE``.

The program checks Python and the packages for executors, makes the server's package `shmserve`
importable, but no other package of the server, and calls MODULE's `main` with further arguments
and ``--fault ""``. On a fault, the program execs the server's Python instead, which runs MODULE
with ``--fault REASON``. Without arguments, the program ends at once: Python was only tried.

Old Pythons must be able to read this file: the syntax is of Python 3.6.
"""

import importlib
import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec

OLDEST = (3, 11)
# Modules of an executor: module, distribution, lowest version, first version that is too new
NEEDED = (
    ("msgspec", "msgspec", "0.20", ""),
    ("numpy", "numpy", "1.26", ""),
    ("ml_dtypes", "ml_dtypes", "0.4", ""),
    ("google.protobuf", "protobuf", "6.30", "8"),
    ("posix_ipc", "posix_ipc", "1.2", ""),
)
# Variables by which the service's Python finds modules
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def requirement(distribution: str, lowest: str, above: str) -> str:
    """Return the requirement on a distribution, as pip takes requirements."""
    return distribution + ">=" + lowest + (",<" + above if above else "")


def fault() -> str:
    """Return the reason why this Python cannot run executors, or "". Import the packages of
    `NEEDED`."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        return "it has Python {}, and 3.11 is the oldest that works".format(version)  # noqa: UP032
    from importlib import metadata

    for module, distribution, lowest, above in NEEDED:
        wanted = requirement(distribution, lowest, above)
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return f"it has no {distribution} ({wanted} is needed)"
        if _number(found) < _number(lowest) or (above and _number(found) >= _number(above)):
            return f"it has {distribution} {found}, and {wanted} is needed"
        try:
            importlib.import_module(module)
        except Exception as ex:
            return f"its package {distribution} {found} cannot be imported: {ex}"
    return ""


def _number(version: str) -> "tuple[int, ...]":
    return tuple(map(int, re.findall("[0-9]+", version)[:3]))


class _ServersPackage:
    """Finder of the server's package `shmserve`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "shmserve":
            return None
        here = os.path.abspath(__file__)
        folder = os.path.dirname(os.path.dirname(os.path.dirname(here)))
        place = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(
            name, place, submodule_search_locations=[folder]
        )


def _enter() -> None:
    """Set the variables for programs that a model starts, and find the server's package."""
    try:
        from setproctitle import getproctitle
    except ImportError:
        pass
    else:
        getproctitle()  # finds the title's memory, as long as the variables are still beside it
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ["PATH"] = os.pathsep.join(
        [os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)]
    )
    if sys.prefix != sys.base_prefix:
        os.environ["VIRTUAL_ENV"] = sys.prefix
    sys.meta_path.insert(0, _ServersPackage)


def main() -> None:
    """Run the module of the command line here, or in the server's Python. Without a module, Python
    was only tried."""
    if not sys.argv[1:]:
        return
    server, module, *words = sys.argv[1:]
    reason = fault()
    if reason:
        os.execv(server, [server, "-P", "-m", module, *words, "--fault", reason])
    _enter()
    sys.argv = [module, *words, "--fault", ""]
    status = importlib.import_module(module).main()
    sys.stdout.flush()
    os._exit(status)  # threads of a model's libraries must not keep the process alive


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that a model has made with multiprocessing's `spawn`
    sys.meta_path.insert(0, _ServersPackage)
