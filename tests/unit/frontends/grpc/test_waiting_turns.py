"""Whose turn for a thread it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.core.scheduling.caller_number import UNKNOWN, caller_number
from shmserve.frontends.grpc.call_turns import CallTurn, PoolPlace
from shmserve.frontends.grpc.waiting_turns import WaitingTurns
from tests.grpc_client import Client, Rig


def test_callers_take_turns_and_so_do_the_connections_of_each() -> None:
    waiting = WaitingTurns()
    for connection in range(50):
        for _ in range(2):
            waiting.add(CallTurn(("flood", connection), PoolPlace(1), print, ()))
    quiet = CallTurn("quiet", PoolPlace(2), print, ())
    waiting.add(quiet)
    gone = CallTurn("gone", PoolPlace(3), print, ())
    waiting.add(gone)
    assert waiting.remove(gone)
    assert not waiting.remove(gone)
    turns = [waiting.next(lambda turn: True) for _ in range(4)]
    assert [turn.line for turn in turns if turn] == [
        ("flood", 0),
        "quiet",
        ("flood", 1),
        ("flood", 2),
    ]
    waiting.add(quiet)
    chosen = waiting.next(lambda turn: turn.place.caller == 2)
    assert chosen is quiet
    assert waiting.count(1) == 97
    assert len(list(waiting)) == 97


@pytest.mark.parametrize("engine", ["http2", "grpcio"])
def test_requests_say_whose_they_are(tmp_path: Path, engine: str) -> None:
    address = f"unix:{tmp_path}/grpc.sock"
    with Rig(also=address, grpc_server=engine) as rig, Client(address) as other:
        rig.client.infer()
        other.infer()
        over_tcp, over_unix = (call.options.caller_number for call in rig.dispatcher.calls)
        assert over_tcp == caller_number("address", "127.0.0.1")
        user = caller_number("user", str(os.geteuid()))
        assert over_unix == (user if engine == "http2" else UNKNOWN)  # grpcio does not tell
