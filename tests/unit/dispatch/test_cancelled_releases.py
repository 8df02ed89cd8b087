"""Tests that a cancelled call leaves the pool's waiting releases to other calls."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from shmserve.dispatch.calls.call import Call


@pytest.mark.parametrize("cancelled", [False, True])
def test_no_release_of_other_requests_is_lost(cancelled):
    pending = [(7, 1), (8, 1)]

    def take(_):
        taken, pending[:] = list(pending), []
        return taken

    attempt = Mock()
    attempt.first.return_value = SimpleNamespace(final=False)
    attempt.next.return_value = SimpleNamespace(final=True)
    call = SimpleNamespace(
        _accept=lambda answer: None,
        _begin=lambda credit: attempt,
        _cancellation=SimpleNamespace(requested=cancelled),
        _held=[],
        _held_bytes=0,
        _options=SimpleNamespace(stream=None),
        _plane=SimpleNamespace(settings=SimpleNamespace(stream_credit=8, stream_timeout_s=0)),
        _pool=SimpleNamespace(take_releases=take),
        _timeout_s=1,
        entry=SimpleNamespace(spec=SimpleNamespace(decoupled=True, name="x")),
    )
    list(Call._answers(call))  # type: ignore[arg-type]
    sent = [slot for each in attempt.acknowledge.call_args_list for slot in each.args[1]]
    assert sent + pending == [(7, 1), (8, 1)]
