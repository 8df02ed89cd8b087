"""Command ``shmserve units ROOT``: writes systemd units for the environment of this program."""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
from pathlib import Path

from shmserve.errors import ConfigError

_ENVIRONMENT = "/opt/shmserve"  # path in the shipped files
_UNITS = ("shmserve.service", "shmserve.socket", "shmserve-grpc.socket")
# hidden by ProtectHome and PrivateTmp
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")


def main(arguments: argparse.Namespace) -> int:
    """Write the units, print the paths and the next steps, and return the exit status.

    Raises:
        ConfigError: the environment has no program, or a file cannot be written.
    """
    app = Path(arguments.app or sys.prefix).absolute()
    programs = app / "bin" if arguments.app else Path(sysconfig.get_path("scripts"))
    if not (programs / "shmserve").is_file():
        raise ConfigError(f"there is no program {programs / 'shmserve'} that the unit could start")
    prefix = Path(arguments.root).absolute() / arguments.prefix.strip("/")
    folders = dict.fromkeys(_UNITS, prefix / "lib/systemd/system")
    places = {name: folder / name for name, folder in folders.items()}
    places["shmserve.sysusers"] = prefix / "lib/sysusers.d/shmserve.conf"
    places["shmserve.toml"] = Path(arguments.root).absolute() / "etc/shmserve/shmserve.toml"
    for name, place in places.items():
        if name == "shmserve.toml" and place.exists():
            print(f"{place} stays as it is")
            continue
        text = (templates() / name).read_text(encoding="utf-8")
        pattern = re.compile(rf"{re.escape(_ENVIRONMENT)}(/bin)?\b")
        _write(place, pattern.sub(lambda it: str(programs if it[1] else app), text))
        print(place)
    hidden = next((folder for folder in _HIDDEN if app.is_relative_to(folder)), "")
    if hidden:
        print(
            f"shmserve: the service cannot see {app}: the unit hides {hidden}; install into "
            "/opt (python3 -m venv /opt/shmserve), or with PIPX_HOME=/opt/pipx",
            file=sys.stderr,
        )
    print("next, as root:  systemd-sysusers && systemctl daemon-reload")
    print("                systemctl enable --now shmserve")
    return 0


def _write(place: Path, text: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        place.chmod(0o644)
    except OSError as ex:
        raise ConfigError(f"{place}: {ex.strerror}") from None


def templates() -> Path:
    """Return the folder of the shipped files: inside the package in a wheel, beside the package in
    a checkout.

    Raises:
        ConfigError: the folder is missing.
    """
    package = Path(__file__).absolute().parents[2]
    for folder in (package / "systemd", package.parent / "deploy" / "systemd"):
        if folder.is_dir():
            return folder
    raise ConfigError("systemd's units are missing from this installation")
