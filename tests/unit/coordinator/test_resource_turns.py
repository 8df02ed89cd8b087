"""The rate limiter's messages: permitted senders, and the contents of a hello."""

import pytest

from shmserve.coordinator.resource_turns import ResourceTurns
from shmserve.core.scheduling.rate_limit_policy import RateLimit, Resource
from shmserve.core.scheduling.rate_limiter import RateLimiter
from shmserve.errors import ProtocolViolation
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import (
    AcquireResources,
    Hello,
    Loaded,
    ReleaseResources,
    ResourcesAcquired,
)
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.tensor.spec import ModelSpec

SPEC = ModelSpec("m", "1", "python", "python", 0, (), ())
LOADED = Loaded("m/1/0", SPEC, "x.sock", "cpu", RateLimit((Resource("memory", 1),)))


class Turns(ResourceTurns):
    """`ResourceTurns` with a record of messages sent."""

    def __init__(self, is_open: bool = True, opens_at: float = 0.0) -> None:
        self.sent: list[tuple[str, FromCoordinator]] = []
        super().__init__(RateLimiter({}, is_open), self.told, opens_at)

    def told(self, process: str, message: FromCoordinator, fds: tuple[int, ...] = ()) -> None:
        self.sent.append((process, message))


def hello(process: str, acquired: int = 0) -> Hello:
    message = Hello(messages.VERSION, "executor", process, 1, loaded=LOADED, acquired=acquired)
    decoded = messages.decode_to_coordinator(messages.encode(message))
    assert isinstance(decoded, Hello)
    return decoded


def test_an_executor_that_says_hello_again_keeps_what_it_says_it_holds() -> None:
    turns = Turns()
    for process in ("a", "b"):
        turns.loaded(process, LOADED)
        turns.handle(process, AcquireResources(1))
    turns.hello(hello("a", acquired=1))  # on another link, before the end of the first was seen
    turns.loaded("a", LOADED)  # a message that was on the way
    assert turns.sent == [("a", ResourcesAcquired(1))]
    turns.hello(hello("a"))  # unless the executor holds nothing any more
    assert turns.sent[1:] == [("b", ResourcesAcquired(1))]


def test_a_link_that_ends_gives_back() -> None:
    turns = Turns()
    for process in ("a", "b"):
        turns.loaded(process, LOADED)
        turns.handle(process, AcquireResources(1))
    turns.gone("a")
    assert turns.sent == [("a", ResourcesAcquired(1)), ("b", ResourcesAcquired(1))]


def test_a_restarted_coordinator_waits_for_those_it_knows_of() -> None:
    turns = Turns(is_open=False, opens_at=5.0)
    turns.hello(hello("a"))
    turns.handle("a", AcquireResources(1))
    turns.tick(4.9, awaiting=False)
    turns.tick(5.1, awaiting=True)
    assert turns.urgent
    turns.hello(hello("b", acquired=4))
    turns.tick(5.2, awaiting=False)
    assert turns.sent == []
    assert not turns.urgent
    turns.handle("b", ReleaseResources())
    assert turns.sent == [("a", ResourcesAcquired(1))]


def test_only_who_needs_resources_may_ask_for_them() -> None:
    turns = Turns()
    with pytest.raises(ProtocolViolation, match="needs no resources"):
        turns.handle("a", AcquireResources(1))
    turns.loaded("a", LOADED)
    with pytest.raises(ProtocolViolation, match="ticket 0"):
        turns.handle("a", AcquireResources(0))
