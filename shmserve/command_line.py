"""Command line: ``shmserve COMMAND``. An error prints a line on stderr and ends with exit status
2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import shmserve
from shmserve import build_id, library_telemetry
from shmserve.config import CONFIG_VARIABLE
from shmserve.errors import ShmserveError

TABLES = (
    "processes", "models", "segments", "slots", "queues", "resources", "cache", "regions",
    "stats", "gpus", "monitor", "events",
)  # fmt: skip
DOORS = ("http", "grpc", "region", "lane")  # transports that `measure` can use
ERROR = 2  # exit status of a failed command; 1: the command ran and the answer is no


class _Parser(argparse.ArgumentParser):
    """Parser that prints a single line for an error, without the usage. Paths may stand anywhere
    between options. `takes_tail`: words behind ``--`` are options for gunicorn."""

    takes_tail = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if self.takes_tail and "--" in words else len(words)
        parsed, unknown = super().parse_known_args(words[:end], namespace)
        if hasattr(parsed, "paths") and not any(word.startswith("-") for word in unknown):
            # argparse fills a list from one run of words, and leaves over the next runs
            parsed.paths, unknown = [*parsed.paths, *unknown], []
        if not self.takes_tail:
            return parsed, unknown
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}; put gunicorn's options after --")
        parsed.gunicorn = words[end + 1 :]
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"shmserve: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints version and build, which are looked up for this argument only."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        build = build_id.build_id()
        print(f"shmserve {shmserve.__version__}{f' (build {build})' if build else ''}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each sets `module`, whose `main` runs the command."""
    whole = _Parser(
        prog="shmserve",
        description="A model server on a zero-copy shared-memory data plane.",
        epilog="Settings come from the TOML file named by SHMSERVE_CONFIG and from "
        "SHMSERVE_* variables: see shmserve settings.",
    )
    whole.add_argument("--version", action=_Version, help="show version and build, and exit")
    whole.add_argument("--config", metavar="FILE", help="settings, instead of SHMSERVE_CONFIG")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, module: str, text: str) -> _Parser:
        made: _Parser = commands.add_parser(name, help=text, description=text)
        made.set_defaults(module=module)
        return made

    _add_serve(command("serve", "serving.serve", "run the server (gunicorn) in the foreground"))
    _add_env(command("env", "serving.env", "make a model's own environment"))
    command("reload", "serving.reload", "replace processes of a running service (setting reload)")
    init = command(
        "init", "serving.init", "make a model repository with examples, and a settings file"
    )
    init.add_argument("folder", metavar="DIR", help="an empty folder, or a new one")
    units = command(
        "units", "serving.units", "write systemd units that run this environment as a service"
    )
    units.add_argument("root", metavar="ROOT", help="root of the files: /, or a folder for a trial")
    units.add_argument("--prefix", default="/usr/local", metavar="DIR", help="default: /usr/local")
    units.add_argument(
        "--app", metavar="DIR", help="environment for the units, such as a link to this one"
    )
    check = command("check", "inspecting.check", "check the settings and every model folder")
    _add_paths(check)
    check.set_defaults(http=None, grpc=None, reload=False, gunicorn=[])
    check.add_argument(
        "--load", action="store_true", help="also load each model, in a process of its own"
    )
    index = command("index", "inspecting.index", "list the files of a repository for a web server")
    index.add_argument("folder", metavar="DIR", help="folder of the repository, for index.json")
    settings = command(
        "settings", "inspecting.settings_reference", "show the settings in effect and their sources"
    )
    settings.add_argument("names", nargs="*", metavar="NAME", help="explain these settings")
    shown = settings.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    shown.add_argument(
        "--markdown", action="store_true", help="print the reference of all settings"
    )
    doctor = command(
        "doctor", "inspecting.doctor", "tell what this host has and lacks, GPUs included"
    )
    doctor.add_argument("--gpu", action="store_true", help="fail unless GPUs can be used")
    doctor.add_argument("--json", action="store_true", help="one JSON array instead of lines")
    _add_show(command("show", "operating.show", "show the state of a running server"))
    for name, text in (
        ("load", "load a model in a running server, for the first time or anew"),
        ("unload", "unload a model in a running server"),
        (
            "ready",
            "tell whether a running server, or one of its models, is ready (status 1: not ready)",
        ),
    ):
        subparser = command(name, "operating.model_commands", text)
        subparser.add_argument("model", metavar="MODEL", nargs="?" if name == "ready" else None)
        _add_address(subparser)
        if name == "ready":
            subparser.add_argument(
                "--wait", type=float, default=0.0, metavar="S", help="seconds to wait for readiness"
            )
    _add_measure(
        command("measure", "measuring.measure", "send generated requests to a model, and time them")
    )
    _add_key(command("key", "serving.key", "make keys for callers"))
    _add_cluster(command("cluster", "serving.cluster", "serve on the nodes of a Ray cluster"))
    complete = command("completion", "shell_completion", "print a completion script for a shell")
    complete.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return whole


def _add_serve(serve: _Parser) -> None:
    serve.takes_tail = True
    options = "[--http ADDRESS] [--grpc ADDRESS] [--reload] [-- GUNICORN OPTIONS]"
    serve.usage = f"shmserve serve [PATH ...] {options}"
    serve.epilog = "The options win over the environment and the file of settings."
    _add_paths(serve)
    address = "HOST:PORT, unix:PATH, or :PORT, which only this host reaches; default: "
    serve.add_argument("--http", metavar="ADDRESS", help=f"{address}http_bind")
    serve.add_argument("--grpc", metavar="ADDRESS", help=f"{address}grpc_bind")
    serve.add_argument(
        "--reload",
        action="store_true",
        help="load a model anew when files in its folder change, and show why it does not load",
    )


def _add_env(env: argparse.ArgumentParser) -> None:
    what = env.add_subparsers(dest="what", required=True)
    text = "make .venv in a model's folder, of requirements.txt and what executors need"
    build = what.add_parser("build", help=text, description=text)
    build.add_argument("folder", metavar="FOLDER", help="a model's folder, or one of its versions")
    build.add_argument(
        "--python", default=sys.executable, metavar="PYTHON", help="default: the server's Python"
    )


def _add_paths(subparser: argparse.ArgumentParser) -> None:
    subparser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        help="model repository, or one model's own folder or Python file, instead of"
        " model_repository",
    )


def _add_show(show: argparse.ArgumentParser) -> None:
    show.add_argument("what", choices=(*TABLES, "top"), help="a table, or top for a live view")
    show.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    show.add_argument(
        "--limit", type=int, metavar="N", help="largest number of rows; for events the latest"
    )
    show.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="for top: seconds between two updates",
    )


def _add_address(subparser: argparse.ArgumentParser) -> None:
    subparser.add_argument(
        "--url",
        help="http://HOST:PORT, https://HOST:PORT or unix:/PATH; default: the first of http_bind",
    )
    subparser.add_argument(
        "--key",
        help="key to send, which other users of this host see; default: of SHMSERVE_KEY",
    )
    subparser.add_argument(
        "--key-file", metavar="FILE", help="file with the key to send (docs/keys.md)"
    )
    subparser.add_argument(
        "--ca", metavar="FILE", help="authorities to trust; default: of SSL_CERT_FILE, or all"
    )
    subparser.add_argument("--cert", metavar="FILE", help="certificate for servers that want one")
    subparser.add_argument("--cert-key", metavar="FILE", help="key of --cert")


def _add_measure(measure: argparse.ArgumentParser) -> None:
    measure.add_argument("model", metavar="MODEL")
    _add_address(measure)
    measure.add_argument(
        "--grpc", metavar="ADDRESS", help="grpcs://HOST:PORT: TLS; default: the first of grpc_bind"
    )
    measure.add_argument(
        "--over",
        nargs="+",
        choices=DOORS,
        help="http, grpc, region (shared memory over HTTP), lane; default: all",
    )
    measure.add_argument("--seconds", type=float, default=5.0, help="longest time for each way")
    measure.add_argument(
        "--warm-up", type=float, default=0.5, metavar="S", help="seconds of load before that"
    )
    measure.add_argument(
        "--requests", type=int, default=1_000_000, help="most requests on each way"
    )
    measure.add_argument(
        "--concurrency",
        metavar="N",
        help="requests at a time; 1,2,4 or 1:32 (doubling): several; default: 1, with --rate 16",
    )
    measure.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="start R requests per second, whenever answers come; latencies count from the plan",
    )
    measure.add_argument(
        "--poisson", action="store_true", help="--rate: random starts, as of many users"
    )
    measure.add_argument("--batch", type=int, default=1, help="rows of a model that has batches")
    measure.add_argument("--size", type=int, default=1, help="size of variable dimensions")
    measure.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="array for an input, instead of a generated one",
    )
    measure.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    measure.add_argument("--svg", metavar="FILE", help="draw latencies and rates")


def _add_key(key: argparse.ArgumentParser) -> None:
    what = key.add_subparsers(dest="what", required=True)
    new = what.add_parser("new", help="make a key, print it once, and add its hash to the file")
    new.add_argument("name", help="name of the holder: letters, digits, - and _")
    new.add_argument(
        "--scopes",
        default="use",
        help="one or more of use,register,change,send-models; default: use",
    )
    new.add_argument("--days", type=int, help="days until the key expires; default: never")
    new.add_argument("--file", help="default: the setting keys_file")


def _add_cluster(cluster: argparse.ArgumentParser) -> None:
    what = cluster.add_subparsers(dest="what", required=True)
    for name, text in (
        ("up", "start a service on each node, or change the models and replicas"),
        ("status", "show the nodes and their models (status 1: a model has no ready replica)"),
        ("down", "end all services after their requests"),
        ("haproxy", "print a configuration for the cluster's HAProxy"),
    ):
        subparser = what.add_parser(name, help=text, description=text)
        subparser.add_argument("file", metavar="FILE", help="cluster.toml")
        if name in ("up", "status"):
            subparser.add_argument("--json", action="store_true", help="one JSON object")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    arguments = parser().parse_args(argv)
    library_telemetry.switch_off(os.environ)  # for libraries that a command imports or starts
    shows_top = (arguments.command, getattr(arguments, "what", "")) == ("show", "top")
    name = "operating.top" if shows_top else arguments.module
    if arguments.config is not None:  # also for the server that `serve` execs
        os.environ[CONFIG_VARIABLE] = os.path.abspath(arguments.config)
    try:
        # Import the command's module alone, for speed: this runs in scripts and before each start
        module = importlib.import_module(f"shmserve.cli.{name}")
        status: int = module.main(arguments)
        sys.stdout.flush()
        return status
    except ShmserveError as ex:
        for line in ex.message.splitlines():
            print(f"shmserve: {line}", file=sys.stderr)
        return ERROR
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
