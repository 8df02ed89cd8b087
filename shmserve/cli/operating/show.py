"""Command ``shmserve show``: prints rows from a running server, or events from its files, as a
table or as JSON."""

import argparse
import os
import time
from typing import Any

import msgspec

from shmserve import config, ids
from shmserve.config import Settings
from shmserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Internal,
    PeerDied,
    ProtocolViolation,
    Unavailable,
)
from shmserve.observe import flight_recorder
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Hello, Show, Shown
from shmserve.transport import rundir
from shmserve.transport.channel import Channel, close_all

_WAIT_S = 3.0

Row = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    limit = arguments.limit
    if limit is not None and limit < 0:
        raise ConfigError(f"--limit: must be 0 or more, not {limit}")
    return run(config.load(), arguments.what, as_json=arguments.json, limit=limit)


def run(settings: Settings, name: str, *, as_json: bool, limit: int | None = None) -> int:
    """Print at most `limit` rows of a table, and return the exit status."""
    run_dir = config.run_dir(settings)
    # Events come from files, which remain when the server has ended.
    from_files = name == "events"
    rows = flight_recorder.rows(run_dir, limit) if from_files else ask(run_dir, name)[:limit]
    if as_json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(table(rows) if rows else f"no {name}")
    return 0


def ask(run_dir: str, name: str) -> list[Row]:
    """Return the rows of a table from the coordinator. Raise Unavailable if no server runs with
    this run directory, or the server does not answer."""
    try:
        place = os.path.join(rundir.serving(run_dir), rundir.COORDINATOR_SOCKET)
        channel = Channel.connect(place, _WAIT_S)
    except PeerDied:
        raise Unavailable(
            f"no server answers in the run directory {run_dir}; SHMSERVE_CONFIG or SHMSERVE_RUN_DIR"
            " must be those of the server, or it is still starting: `shmserve ready --wait 60`"
        ) from None
    try:
        process = ids.new_process_id("cli", os.getpid())
        channel.send(messages.encode(Hello(messages.VERSION, "cli", process, os.getpid())))
        channel.send(messages.encode(Show(1, name)))
        return _receive(channel)
    except (PeerDied, DeadlineExceeded, ProtocolViolation):
        raise Unavailable("the server does not answer") from None
    finally:
        channel.close()


def _receive(channel: Channel) -> list[Row]:
    rows: list[Row] = []
    deadline = time.monotonic() + _WAIT_S
    while True:
        data, fds = channel.receive(max(0.01, deadline - time.monotonic()))
        close_all(fds)
        message = messages.decode_from_coordinator(data)
        if not isinstance(message, Shown):
            continue
        if message.error:
            raise Internal(message.error)
        rows += message.rows
        if not message.more:
            return rows


def table(rows: list[Row]) -> str:
    """Return aligned columns, ordered by first appearance. Numbers are aligned to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns]
    lines += [[str(row.get(key, "")).replace("\n", " ") for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(isinstance(row.get(key, 0), int | float) for row in rows) for key in columns]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )
