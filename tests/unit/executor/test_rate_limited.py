"""An executor that shares resources: asking, holding, giving back, and the coordinator's death."""

from shmserve.executor.rate_limited import SharedResources
from shmserve.protocol.control.link_messages import AcquireResources, ReleaseResources
from shmserve.protocol.control.messages import ToCoordinator


class Asked:
    """`SharedResources` with this test as the coordinator."""

    def __init__(self) -> None:
        self.sent: list[ToCoordinator] = []
        self.woken = 0
        self.resources = SharedResources(self.sent.append, self.wake)

    def wake(self) -> None:
        self.woken += 1

    def take(self) -> list[ToCoordinator]:
        sent = self.sent[:]
        self.sent.clear()
        return sent


def test_each_execution_has_a_turn_of_its_own_and_the_last_one_gives_back() -> None:
    asked = Asked()
    resources = asked.resources
    assert not resources.may_run(True)
    assert not resources.may_run(True)  # the executor has asked
    assert asked.take() == [AcquireResources(1)]
    resources.acquired(1)
    assert asked.woken == 1
    assert resources.may_run(True)
    assert resources.ticket == 1
    resources.spent()
    assert not resources.may_run(True)
    assert asked.take() == [AcquireResources(2)]  # the message also gives back the held resources
    resources.acquired(2)
    resources.spent()
    assert not resources.may_run(False)
    assert not resources.may_run(False)
    assert asked.take() == [ReleaseResources()]
    assert resources.ticket == 0


def test_a_turn_that_comes_when_nobody_wants_it_is_not_taken() -> None:
    asked = Asked()
    resources = asked.resources
    resources.may_run(True)
    resources.may_run(False)  # the request was cancelled
    resources.acquired(1)
    assert asked.take() == [AcquireResources(1), ReleaseResources()]
    assert not resources.may_run(True)
    resources.acquired(1)
    assert not resources.held
    resources.acquired(2)
    assert resources.held


def test_a_turn_that_is_not_used_goes_back() -> None:
    asked = Asked()
    asked.resources.may_run(True)
    asked.resources.acquired(1)
    asked.resources.may_run(False)
    assert asked.take() == [AcquireResources(1), ReleaseResources()]


def test_another_coordinator_is_asked_again_and_told_what_is_held() -> None:
    asked = Asked()
    asked.resources.may_run(True)
    asked.take()
    assert asked.resources.ticket == 0
    asked.resources.welcomed()
    assert asked.take() == [AcquireResources(1)]
    asked.resources.acquired(1)
    assert asked.resources.ticket == 1
    asked.resources.welcomed()
    assert asked.take() == []
