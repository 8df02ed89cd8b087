"""Options of ``shmserve serve``: settings on the command line, which win over the environment and
the file.

Options become variables of the environment, so all processes of the service see them.
"""

import argparse
import itertools
import os
import re
from collections.abc import Iterator, MutableMapping, Sequence

from shmserve import config, ids, model_places
from shmserve.config import PREFIX, Settings
from shmserve.errors import ConfigError
from shmserve.supervisor.generations import activation, keeper
from shmserve.transport import listen_addresses

_RELOAD = {"model_control": "poll", "poll_interval_s": "0.3"}
_BIND = re.compile("-b|--bi(nd?)?(=|$)")  # gunicorn's option, as short as it may be written
_PORT = re.compile(r":[0-9]+")


def take(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> list[str]:
    """Put the options into the environment. Return sentences: about PATH if it is a single model,
    and about each setting with another value in the environment or in the file. Raise ConfigError
    for options that cannot be, or cannot be together."""
    given = dict(_given(arguments))
    if not given:
        return []
    before = config.read(environ)
    for values in given.values():
        environ.update({f"{PREFIX}{name.upper()}": text for name, text in values.items()})
    after = config.load(environ)
    _check_addresses(given, after, arguments.gunicorn, environ)
    stores = filter(model_places.is_remote, after.model_repository)
    if arguments.reload and (store := next(stores, "")):
        raise ConfigError(
            f"--reload: looks at files of this host, and {store} is a store; for stores there is"
            " model_control = poll"
        )
    declared = config.declared()
    singles = map(model_places.single_of, after.model_repository if arguments.paths else ())
    told = [f"serving model {single[0]} from {single[1]}" for single in singles if single]
    return told + [
        f"{option} replaces {name} = {declared[name].text(old)} ({before.origins[name]})"
        for option, values in given.items()
        for name in values
        if name in before.origins
        and (old := getattr(before.settings, name)) != getattr(after, name)
    ]


def _given(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each given option with its settings, as texts."""
    if arguments.paths:
        yield "PATH", {"model_repository": ",".join(map(_repository, arguments.paths))}
    for name in ("http", "grpc"):
        if (text := getattr(arguments, name)) is not None:
            yield f"--{name}", {f"{name}_bind": _addresses(f"--{name}", text)}
    if arguments.reload:
        yield "--reload", _RELOAD


def _repository(path: str) -> str:
    """Return the entry of `model_repository` for a repository, a model's own folder, or a model of
    one Python file."""
    from shmserve.repository import no_models  # slow to import, and a service needs no PATH

    if model_places.is_remote(path):
        return path
    name, path = model_places.single_of(path) or ("", path)
    folder = os.path.abspath(path)
    is_file = model_places.is_one_file(folder)
    if not is_file and not os.path.isdir(folder):
        raise ConfigError(f"PATH: '{path}' is no folder and no Python file")
    if "," in folder:
        raise ConfigError(f"PATH: '{folder}' has a comma; give it in a file as model_repository")
    if not name and (is_file or no_models.sign_of_model(folder)):
        name = os.path.basename(folder)[:-3] if is_file else no_models.name_of(folder)
        if name.isdecimal():
            raise ConfigError(
                f"PATH: '{path}' looks like a model's version: name the folder above it"
                f" ({os.path.dirname(folder)}), or give NAME={path}"
            )
        if fault := ids.model_name_fault(name):
            advice = f"give NAME={path}"
            raise ConfigError(f"PATH: '{name}' cannot be the name of a model ({fault}): {advice}")
    elif not name and (reason := no_models.of_sources(folder)):
        raise ConfigError(f"PATH: '{path}' {reason}")
    return f"{name}={folder}" if name else folder


def _addresses(option: str, text: str) -> str:
    """Return addresses with 127.0.0.1 in place of a missing host."""
    places = [f"127.0.0.1{p}" if _PORT.fullmatch(p) else p for p in text.split(",")]
    for place in places:
        listen_addresses.parse(option, place)
    return ",".join(places)


def _check_addresses(
    given: dict[str, dict[str, str]],
    settings: Settings,
    gunicorn: Sequence[str],
    environ: MutableMapping[str, str],
) -> None:
    of_environ = environ.get("GUNICORN_CMD_ARGS", "").split()
    if "--http" in given and any(map(_BIND.match, [*gunicorn, *of_environ])):
        raise ConfigError(
            "--http and gunicorn's --bind, also in GUNICORN_CMD_ARGS, cannot be together:"
            " leave one out"
        )
    options = " and ".join(sorted({"--http", "--grpc"} & given.keys()))
    if not options:
        return
    passed = activation.passed_for(environ)
    for kind in sorted(passed) if keeper.VARIABLE not in environ else ():
        if f"--{kind}" in given:
            text = f"systemd passes this service's sockets for {kind}; leave the option out"
            raise ConfigError(f"--{kind}: {text}")
    if passed or not settings.grpc_processes:
        return  # only one of the two settings is listened on
    http = [text for text in settings.http_bind if not listen_addresses.is_descriptor(text)]
    for pair in itertools.product(http, settings.grpc_bind):
        one, other = map(listen_addresses.parse, ("http_bind", "grpc_bind"), pair)
        if listen_addresses.overlap(one, other):
            places = f"HTTP ({one.text}) and gRPC ({other.text})"
            raise ConfigError(f"{options}: {places} would have the same address")
