"""Commands ``shmserve load | unload | ready``: HTTP requests that any client may send."""

import argparse
import time
import urllib.parse

from shmserve import config
from shmserve.cli.operating import server_address
from shmserve.cli.operating.server_address import Asking
from shmserve.errors import ConfigError, Unavailable

_MORE_S = 10.0  # seconds in addition to the limit for loading a model
_READY_S = 5.0
_POLL_S = 0.2


def main(arguments: argparse.Namespace) -> int:
    """Run the command, print the outcome, and return the exit status."""
    settings = config.load()
    url = server_address.http(settings, arguments.url)
    credentials = server_address.credentials(arguments)
    if arguments.command == "ready":
        with Asking(url, credentials, _READY_S) as server:
            return _ready(server, arguments.model, arguments.wait)
    with Asking(url, credentials, settings.load_timeout_s + _MORE_S) as server:
        return _change(server, arguments.command, arguments.model)


def _change(server: Asking, what: str, model: str) -> int:
    """Load or unload a model. Raise Unavailable if no server answers, or if the server refuses."""
    path = f"/v2/repository/models/{urllib.parse.quote(model, safe='')}/{what}"
    status, error, _ = server.ask("POST", path, b"{}")
    if status != 200:
        raise Unavailable(f"{what} {model}: {error}")
    print(f"{model}: {what}ed")
    return 0


def _ready(server: Asking, model: str | None, wait_s: float) -> int:
    if not 0 <= wait_s < float("inf"):
        raise ConfigError("--wait: must be a number of seconds, 0 or more")
    path = "/v2/health/ready"
    if model is not None:
        path = f"/v2/models/{urllib.parse.quote(model, safe='')}/ready"
    what = model or "the server"
    deadline = time.monotonic() + wait_s
    while True:
        try:
            status, error, _ = server.ask("GET", path)
        except Unavailable as ex:
            status, error = 0, ex.message
        if status == 200:
            print(f"{what} is ready")
            return 0
        refused = 400 <= status < 500 and status != 404  # 404: the model may not be loaded yet
        if time.monotonic() >= deadline or refused:
            error = error.removeprefix(f"{what} is not ready").removeprefix(": ")
            print(f"{what} is not ready{f': {error}' if error else ''}")
            return 1
        time.sleep(_POLL_S)
