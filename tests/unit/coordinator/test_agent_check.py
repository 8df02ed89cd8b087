"""Answers of the agent check over real sockets, and the cost for the coordinator."""

from __future__ import annotations

import selectors
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.coordinator import agent_check
from shmserve.coordinator.agent_check import AgentCheck, AgentConnection
from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.coordinator.stats.host_capacity import free_percent
from shmserve.core.control.lifecycle import State
from shmserve.core.control.records import InstanceRecord, ModelRecord, Revision, VersionRecord
from shmserve.core.registry import Snapshot
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.protocol.control.stats_messages import PageOwner
from shmserve.tensor.spec import ModelSpec
from tests.running_server import free_port


class Agent:
    """An agent with the loop of a coordinator, and a clock that the test sets."""

    def __init__(self) -> None:
        self.port, self.percent, self.asked, self.now = free_port(), 75, 0, 0.0
        self.selector = selectors.DefaultSelector()
        self.check = AgentCheck([f"127.0.0.1:{self.port}"], self._free, self.selector)

    def _free(self) -> int:
        self.asked += 1
        return self.percent

    def turn(self, known: bool = True) -> None:
        self.check.settle(self.now, known)
        for key, _ in self.selector.select(0.2):
            if isinstance(key.data, AgentConnection):
                self.check.ready(key.data)
            else:
                key.data.accept(key.fileobj, self.now)

    def ask(self, said: bytes = b"") -> bytes:
        """Return the answer to a peer that sends `said` and ends."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as peer:
            peer.sendall(said)
            self.turn()
            told = b""
            while part := peer.recv(100):
                told += part
        while self.open:
            self.turn()
        return told

    @property
    def open(self) -> int:
        return sum(isinstance(k.data, AgentConnection) for k in self.selector.get_map().values())


@pytest.fixture
def agent():
    made = Agent()
    yield made
    for key in list(made.selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    made.selector.close()


def test_one_that_is_ended_for_another_may_have_closed_in_the_same_turn(agent: Agent) -> None:
    agent.turn()
    peers = []
    for _ in range(agent_check._MAX_CONNECTIONS):
        peers.append(socket.create_connection(("127.0.0.1", agent.port), 5))
        agent.turn()
    (listener,) = (key for key in agent.selector.get_map().values() if key.data is agent.check)
    oldest = next(iter(agent.check._connections))
    peers.append(socket.create_connection(("127.0.0.1", agent.port), 5))
    peers[0].close()
    agent.check.accept(listener.fileobj, agent.now)  # type: ignore[arg-type]
    agent.check.ready(oldest)
    for peer in peers:
        peer.close()
    while agent.open:
        agent.turn()


def test_one_line_is_told_and_the_connection_ends(agent: Agent) -> None:
    agent.turn()
    assert agent.ask() == b"75%\n"
    agent.percent, agent.now = 0, 1.0
    assert agent.ask(b"host1 " * 100 + b"\n") == b"0%\n", "what agent-send says is no matter"


def test_nobody_is_told_before_it_is_known_what_runs(agent: Agent) -> None:
    agent.turn(known=False)
    with pytest.raises(ConnectionRefusedError):
        agent.ask()
    agent.turn()
    assert agent.ask() == b"75%\n"


def test_an_answer_is_good_for_a_moment(agent: Agent) -> None:
    agent.turn()
    for _ in range(5):
        agent.ask()
    assert agent.asked == 1
    agent.now = 1.0
    agent.ask()
    assert agent.asked == 2


def test_peers_that_do_not_close_are_bounded_in_number_and_time(agent: Agent) -> None:
    agent.turn()
    most = agent_check._MAX_CONNECTIONS
    peers = [socket.create_connection(("127.0.0.1", agent.port), 5) for _ in range(most)]
    while agent.open < most:
        agent.turn()
    late = socket.create_connection(("127.0.0.1", agent.port), 5)
    agent.turn()
    assert agent.open == most, "the oldest makes room"
    assert late.recv(100) == b"75%\n"
    agent.now += agent_check._PATIENCE_S
    agent.turn()
    assert agent.open == 0
    for peer in (*peers, late):
        peer.close()


def test_a_peer_that_is_gone_already_costs_nothing(agent: Agent) -> None:
    agent.turn()
    peer = socket.create_connection(("127.0.0.1", agent.port), 5)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()  # with a reset
    agent.turn()
    assert agent.ask() == b"75%\n"


# ------------------------------------------------------------- what is told


def _instance(live: bool, left: bool = False) -> InstanceRecord:
    state = State.READY if live else State.WANTED
    return InstanceRecord("m/1/0", state, endpoint="e" if live else "", left=left)


def _sources(*instances: InstanceRecord, readings: tuple[CounterReading, ...] = ()) -> Any:
    spec = ModelSpec("m", "1", "native", "native", 0, (), ())
    model = ModelRecord("m", serving=Revision(1, [VersionRecord(spec, list(instances))]))
    return SimpleNamespace(
        reconciler=SimpleNamespace(
            models=SimpleNamespace(by_name={"m": model, "loading": ModelRecord("loading")}),
            ledger=SimpleNamespace(pool_bytes=1000),
        ),
        counters=SimpleNamespace(readings=lambda: list(readings)),
    )


def _executor(depth: int, running: int, **gauges: int) -> CounterReading:
    owner = PageOwner("executor-1-a", "executor", 1, "m", "1", "m/1/0")
    counts = ExecutorCounts()
    return CounterReading(owner, Gauges(**gauges), {}, counts, depth, 1, running)


def _frontend(in_flight: int, **gauges: int) -> CounterReading:
    rows = {("m", "1"): RequestCounts(in_flight=in_flight)}
    return CounterReading(PageOwner("http-1-a", "http", 1, "", "", ""), Gauges(**gauges), rows)


READY = Snapshot("e", 1, complete=True)


def test_a_host_that_is_not_ready_is_told_to_get_nothing() -> None:
    sources = _sources(_instance(True))
    assert free_percent(sources, None) == 0
    assert free_percent(sources, Snapshot("e", 1)) == 0
    assert free_percent(sources, Snapshot("e", 1, complete=True, draining=True)) == 0
    assert free_percent(sources, READY) == 100


def test_instances_that_are_missing_count_and_those_that_leave_do_not() -> None:
    some = [_instance(True), _instance(True), _instance(False), _instance(True)]
    assert free_percent(_sources(*some), READY) == 75
    assert free_percent(_sources(*some[:2], _instance(True, left=True)), READY) == 100


@pytest.mark.parametrize(
    ("readings", "percent"),
    [
        # the executor works and has not read the messages sent
        ([_frontend(9), _executor(0, 1)], 50),
        ([_frontend(1), _executor(9, 1)], 50),  # the frontend has not said yet
        ([_frontend(5), _frontend(4), _executor(1, 1)], 50),
        ([_frontend(32), _executor(32, 32)], 100),  # all requests in one batch
        ([_frontend(0, slot_bytes=400), _executor(0, 0, slot_bytes=300)], 30),
        ([_frontend(0, slot_bytes=400, cache_bytes=400)], 100),  # the cache gives way
        ([_frontend(8, slot_bytes=900), _executor(0, 0)], 10),  # the scarcer of both
    ],
)
def test_what_waits_and_what_is_held_lowers_it(readings, percent) -> None:
    assert free_percent(_sources(_instance(True), readings=tuple(readings)), READY) == percent
