"""``shmserve serve | check | doctor | show | key``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shmserve import config
from shmserve.errors import ShmserveError

TABLES = (
    "processes",
    "models",
    "segments",
    "slots",
    "queues",
    "resources",
    "cache",
    "regions",
    "stats",
    "gpus",
    "monitor",
    "events",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmserve",
        description="A model server on a zero-copy shared-memory data plane.",
        epilog="Settings come from the TOML file named by SHMSERVE_CONFIG and from "
        "SHMSERVE_* variables.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the server (gunicorn) in the foreground")
    serve.add_argument("gunicorn", nargs="*", help="options for gunicorn, after --")
    check = commands.add_parser("check", help="check the settings and every model folder")
    check.add_argument(
        "--load", action="store_true", help="load each model, too, in a process of its own"
    )
    doctor = commands.add_parser("doctor", help="say what this host has and lacks, GPUs included")
    doctor.add_argument("--gpu", action="store_true", help="fail unless GPUs can be used")
    doctor.add_argument("--json", action="store_true", help="one JSON array instead of lines")
    show = commands.add_parser("show", help="ask a running server what is going on")
    show.add_argument("what", choices=TABLES)
    show.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    key = commands.add_parser("key", help="make keys for those who call").add_subparsers(
        dest="what", required=True
    )
    new = key.add_parser("new", help="make a key, print it once, and add its hash to the file")
    new.add_argument("name", help="whose it is: letters, digits, - and _")
    new.add_argument("--scopes", default="use", help="of use,register,change,send-models")
    new.add_argument("--days", type=int, help="until it expires; default: never")
    new.add_argument("--file", help="default: the setting keys_file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        settings = config.load()
        if arguments.command == "serve":
            from shmserve.cli import serve

            serve.run(arguments.gunicorn)
        if arguments.command == "check":
            from shmserve.cli import check

            return check.run(settings, arguments.load)
        if arguments.command == "doctor":
            from shmserve.cli import doctor

            return doctor.run(settings, arguments.gpu, as_json=arguments.json)
        if arguments.command == "key":
            from shmserve.cli import key

            scopes = arguments.scopes.split(",")
            return key.new(settings, arguments.file, arguments.name, scopes, arguments.days)
        from shmserve.cli import show

        return show.run(settings, arguments.what, as_json=arguments.json)
    except ShmserveError as ex:
        print(f"shmserve: {ex.message}", file=sys.stderr)
        return 1
