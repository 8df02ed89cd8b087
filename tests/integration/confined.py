"""Run a command confined as the unit says: ``confined.py UNIT FOLDER [--mounts] COMMAND...``.

The confinement is read from the unit. A line of the unit that is neither in `APPLIED` nor in
`NOT_APPLIED` is an error, so every new line needs a test. FOLDER is the folder that the service
may write to, as its RuntimeDirectory. Without ``--mounts`` only system calls are confined. Groups
of system calls mean what the installed systemd says.
"""

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path

ROOT = Path(__file__).parents[2]

_ALLOW = 0x7FFF0000
_EPERM = 0x00050001  # SCMP_ACT_ERRNO(EPERM)
_EQUAL = 4  # SCMP_CMP_EQ
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18

_MANAGER = "what systemd does with the process, not what the process may do"
_CGROUP = "a control group's: its devices and limits are not a mount namespace's business"
_NEVER_MADE = "filters arguments of system calls that the service never makes"
NOT_APPLIED = {
    **dict.fromkeys(
        (
            *("Type", "NotifyAccess", "ExecStart", "ExecStartPre", "ExecReload", "KillMode"),
            *("Restart", "RestartSec", "TimeoutStartSec", "TimeoutStopSec", "WatchdogSec"),
            *("OOMPolicy", "RemoveIPC", "FileDescriptorStoreMax"),
        ),
        _MANAGER,
    ),
    **dict.fromkeys(("DevicePolicy", "DeviceAllow", "TasksMax"), _CGROUP),
    **dict.fromkeys(
        ("RestrictNamespaces", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID"),
        _NEVER_MADE,
    ),
    **dict.fromkeys(
        ("User", "Group"), "the interpreter and the models of a test are for its own user to read"
    ),
    **dict.fromkeys(
        (
            *("Environment", "EnvironmentFile", "WorkingDirectory", "CacheDirectory"),
            *("StateDirectory", "StateDirectoryMode"),
        ),
        "the test has settings and folders of its own",
    ),
    "RuntimeDirectory": "FOLDER is in its place",
    "RuntimeDirectoryMode": "FOLDER has the test's",
    "AmbientCapabilities": "there are none to begin with",
    "OOMScoreAdjust": "to lower it takes a right that root may lack; nothing else depends on it",
    "PrivateIPC": "the unit says that there is none",
    "ProcSubset": "the unit says that all is there",
    "ProtectClock": "takes capabilities, of which there are none, and a group of system calls",
    "SystemCallArchitectures": "a filter is of the architecture that it is made on",
    "SystemCallErrorNumber": "the filter's, see `_EPERM`",
    "SystemCallFilter": "see `confine`",
    "RestrictAddressFamilies": "see `confine`",
}

_libc = ctypes.CDLL(None, use_errno=True)


def lines(unit: Path) -> Iterator[tuple[str, str]]:
    """Yield names and values from the unit's [Service] section."""
    section = unit.read_text().partition("[Service]\n")[2].partition("\n[Install]")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name, value


# ------------------------------------------------------------------------------- namespaces


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call(
        "mount",
        *(source.encode(), target.encode(), kind and kind.encode()),
        *(ctypes.c_ulong(flags), options.encode() or None),
    )


def _read_only(path: str) -> None:
    _mount("none", path, None, _REMOUNT | _BIND | _RDONLY)


class Namespace:
    """Private mount namespace in which FOLDER and the files that tests need stay in place."""

    def __init__(self, folder: str) -> None:
        _call("unshare", _CLONE_NEWNS)
        _mount("none", "/", None, _REC | _PRIVATE)
        self._folder = folder
        kept = (folder, sys.base_prefix, sys.prefix, str(ROOT))
        self._kept = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in kept}
        self._writable: list[str] = [folder]

    def cover(self, path: str, mode: str) -> None:
        """Mount an empty tmpfs over a folder."""
        if not os.path.isdir(path) or os.path.islink(path):
            return
        _mount("tmpfs", path, "tmpfs", 0, f"mode={mode}")
        for kept, fd in self._kept.items():
            if kept.startswith(f"{path}/"):
                os.makedirs(kept, exist_ok=True)
                _mount(f"/proc/self/fd/{fd}", kept, None, _BIND | _REC)

    def protect_system(self, _: str) -> None:
        self._each_read_only("/", ("/dev", "/proc", "/sys", *self._writable))

    def protect_home(self, _: str) -> None:
        for path in ("/home", "/root", "/run/user"):
            self.cover(path, "0755")

    def private_tmp(self, _: str) -> None:
        for path in ("/tmp", "/var/tmp"):
            self.cover(path, "1777")
            self._writable.append(path)

    def protect_proc(self, value: str) -> None:
        _mount("proc", "/proc", "proc", 0, f"hidepid={value}")

    def protect_kernel_tunables(self, _: str) -> None:
        _mount("/proc/sys", "/proc/sys", None, _BIND)
        _read_only("/proc/sys")
        _read_only("/sys")

    def protect_kernel_modules(self, _: str) -> None:
        self.cover("/usr/lib/modules", "0")

    def protect_kernel_logs(self, _: str) -> None:
        for path in ("/dev/kmsg", "/proc/kmsg"):
            if os.path.exists(path):
                _mount("/dev/null", path, None, _BIND)

    def protect_control_groups(self, _: str) -> None:
        self._each_read_only("/sys/fs/cgroup", ())

    def _each_read_only(self, below: str, but: tuple[str, ...]) -> None:
        for row in Path("/proc/self/mountinfo").read_text().splitlines():
            path = row.split()[4]
            if path in but or path.startswith(tuple(f"{each}/" for each in but)):
                continue
            if path == below or path.startswith(f"{below.rstrip('/')}/"):
                with contextlib.suppress(FileNotFoundError):  # another mount covers the path
                    _read_only(path)


def _no_capabilities(_: str) -> None:
    capability = 0
    while not _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    assert capability, "root has some to lose"


def _limit(kind: int) -> Callable[[str], None]:
    def apply(value: str) -> None:
        most = resource.getrlimit(kind)[1]  # root may lack the right to raise a hard limit
        if value != "infinity":
            most = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
        resource.setrlimit(kind, (most, most))

    return apply


def applied(place: Namespace) -> dict[str, Callable[[str], object]]:
    """Return the function that applies each line of the unit, in order: first hide, then fix."""
    return {
        "LimitMEMLOCK": _limit(resource.RLIMIT_MEMLOCK),
        "LimitNOFILE": _limit(resource.RLIMIT_NOFILE),
        "LimitCORE": _limit(resource.RLIMIT_CORE),
        "UMask": lambda value: os.umask(int(value, 8)),
        "PrivateMounts": lambda _: None,  # the namespace is private already
        "ProtectHostname": lambda _: _call("unshare", _CLONE_NEWUTS),
        "ProtectHome": place.protect_home,
        "PrivateTmp": place.private_tmp,
        "ProtectProc": place.protect_proc,
        "ProtectKernelModules": place.protect_kernel_modules,
        "ProtectKernelLogs": place.protect_kernel_logs,
        "ProtectKernelTunables": place.protect_kernel_tunables,
        "ProtectControlGroups": place.protect_control_groups,
        "ProtectSystem": place.protect_system,
        "CapabilityBoundingSet": _no_capabilities,
        "NoNewPrivileges": lambda _: _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
    }


def enter(unit: Path, folder: str) -> None:
    """Confine this process to the view and the rights of the service.

    Raises:
        AssertionError: the unit has lines that this program does not handle, or lacks some.
    """
    told = dict(lines(unit))
    makes = applied(Namespace(folder))
    known = makes.keys() | NOT_APPLIED.keys()
    assert known == told.keys(), "lines that are not known, or not there"
    assert not makes.keys() & NOT_APPLIED.keys()
    for name, make in makes.items():
        make(told[name])


# ----------------------------------------------------------------------------- system calls


def members(name: str) -> set[str]:
    """Return the system calls of a group, or the single system call of this name."""
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
    """Return the system calls that SystemCallFilter allows.

    Lines apply in order. The first line lists allowed calls, so unlisted calls are forbidden.
    """
    calls = members("@default")
    for name, words in lines(unit):
        if name == "SystemCallFilter":
            named: set[str] = set().union(*map(members, words.removeprefix("~").split()))
            calls = calls - named if words.startswith("~") else calls | named
    return calls


class _Comparison(ctypes.Structure):
    _fields_ = (
        *(("arg", ctypes.c_uint), ("op", ctypes.c_int)),
        *(("datum_a", ctypes.c_uint64), ("datum_b", ctypes.c_uint64)),
    )


def confine(calls: set[str], families: list[str]) -> None:
    """Restrict this process to these system calls, and to sockets of these families."""
    library = ctypes.CDLL(find_library("seccomp"))
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.c_void_p,
    )
    library.seccomp_load.argtypes = (ctypes.c_void_p,)
    context = library.seccomp_init(_EPERM)
    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # another architecture's
            continue
        if name != "socket":
            assert library.seccomp_rule_add_array(context, _ALLOW, number, 0, None) == 0, name
            continue
        for family in families:
            same = _Comparison(0, _EQUAL, getattr(socket, family), 0)
            added = library.seccomp_rule_add_array(context, _ALLOW, number, 1, ctypes.byref(same))
            assert added == 0, family
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    unit, folder, *command = sys.argv[1:]
    calls = allowed(Path(unit))
    families = dict(lines(Path(unit)))["RestrictAddressFamilies"].split()
    if command[0] == "--mounts":
        enter(Path(unit), folder)
        os.chdir(ROOT)  # resolve the folder in the new mounts
        command = command[1:]
    confine(calls, families)
    os.execvp(command[0], command)
