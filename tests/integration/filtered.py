"""Run a command as the unit has it run: ``filtered.py UNIT COMMAND...``, under its system calls.

The groups mean what the installed systemd says.
"""

import ctypes
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

_ALLOW = 0x7FFF0000
_EPERM = 0x00050001  # SCMP_ACT_ERRNO(EPERM)


def members(name: str) -> set[str]:
    """The system calls of a group, or the one of this name."""
    if not name.startswith("@"):
        return {name}
    told = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
    ).stdout
    found: set[str] = set()
    for line in told.splitlines()[1:]:
        if line.strip() and not line.strip().startswith("#"):
            found |= members(line.strip())
    return found


def allowed(unit: Path) -> set[str]:
    """What SystemCallFilter leaves, line by line: the first says that what is not named is not."""
    calls = members("@default")
    for line in unit.read_text().splitlines():
        if line.startswith("SystemCallFilter="):
            words = line.partition("=")[2]
            named: set[str] = set().union(*map(members, words.removeprefix("~").split()))
            calls = calls - named if words.startswith("~") else calls | named
    return calls


def confine(calls: set[str]) -> None:
    """From now on this process may make no others."""
    library = ctypes.CDLL(find_library("seccomp"))
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
    )
    library.seccomp_load.argtypes = (ctypes.c_void_p,)
    context = library.seccomp_init(_EPERM)
    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else another architecture's
            assert library.seccomp_rule_add(context, _ALLOW, number, 0) == 0, name
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    confine(allowed(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
