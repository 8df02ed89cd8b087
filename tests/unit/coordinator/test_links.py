"""Last messages of a process before its end, while the coordinator has messages for the process."""

from __future__ import annotations

import os
import selectors
import socket
from typing import Any

import pytest

from shmserve.coordinator.links import Links
from shmserve.coordinator.process_connections import ProcessConnection
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import AskStats, Hello, LoadFailed, Welcome

NAME = "executor-1-aa"
LAST_WORDS = LoadFailed("m/1/0", "the model says no")


class Router:
    """Hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def hello(self, message: Hello, pid: int, now: float) -> None:
        self.heard.append("hello")

    def handle(self, process: str, role: str, message: object, fds: Any, now: float) -> None:
        self.heard.append(message)

    def gone(self, process: str, now: float) -> None:
        self.heard.append("gone")


class Executor:
    """The executor's end of a link, with the coordinator's loop for the other end."""

    def __init__(self) -> None:
        self.router = Router()
        self.selector = selectors.DefaultSelector()
        self.links = Links(self.selector, Welcome(messages.VERSION, "e"))
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.selector.register(other, selectors.EVENT_READ, ProcessConnection(other))
        self.say(Hello(messages.VERSION, "executor", NAME, os.getpid(), instance="m/1/0"))
        self.turn()
        assert self.socket.recv(1 << 16)  # welcome

    def say(self, message: messages.ToCoordinator) -> None:
        self.socket.send(messages.encode(message))

    def turn(self) -> None:
        for key, ready in self.selector.select(0):
            self.links.ready(key.data, ready, self.router)  # type: ignore[arg-type]
        self.links.bury(self.router)  # type: ignore[arg-type]


@pytest.fixture
def executor():
    executor = Executor()
    yield executor
    executor.socket.close()
    for key in list(executor.selector.get_map().values()):
        key.data.close()
    executor.selector.close()


@pytest.mark.parametrize("told", ["before", "after"])
def test_last_words_are_heard(executor: Executor, told: str) -> None:
    if told == "before":  # and never read
        executor.links.send(NAME, AskStats(1, "busy"))
    executor.say(LAST_WORDS)
    executor.socket.close()
    if told == "after":
        executor.links.send(NAME, AskStats(1, "busy"))
        executor.links.bury(executor.router)  # type: ignore[arg-type]
    for _ in range(3):
        executor.turn()
    assert executor.router.heard == ["hello", LAST_WORDS, "gone"]
    assert not executor.selector.get_map()
