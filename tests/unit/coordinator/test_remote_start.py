"""Start with a remote repository: rounds of the fetcher before the first models are loaded."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shmserve.config import Settings
from shmserve.coordinator import assembly
from shmserve.coordinator.models.desired_models import DesiredModels
from shmserve.coordinator.models.model_control import ModelControl
from shmserve.errors import Code
from shmserve.protocol.control.model_messages import LoadModel, ModelsFetched


def test_no_model_is_loaded_before_the_repository_has_been_read() -> None:
    reconciler: Any = SimpleNamespace(complete=False, draining=False, processes={})
    send = Mock()
    settings = Settings(model_control="explicit")
    control = ModelControl(settings, reconciler, Mock(), Mock(), send, Mock())
    control.ask("http-1", LoadModel(1, "digits"))
    asker, answer = send.call_args.args
    assert asker == "http-1"
    assert answer.error_code == Code.UNAVAILABLE
    assert answer.error == "the server has not read its repository yet"


def test_a_round_while_the_models_are_read_loads_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a load would meet the start's own, and one load of a model at a time is allowed."""
    begun: list[DesiredModels] = []
    monkeypatch.setattr(assembly, "begin", lambda parts, desired, marks: begun.append(desired))
    jobs: list[Callable[[Any], None]] = []
    background, library, parts = Mock(), Mock(), Mock()
    background.submit = lambda _, done: not jobs.append(done)
    library.pending.return_value = False
    parts.control.remote.notices = {}
    start = assembly.RemoteStart(Settings(), library, background, parts, {}, True)
    start.fetched(ModelsFetched(1))
    start.fetched(ModelsFetched(1))
    assert len(jobs) == 1
    parts.control.renew.assert_not_called()
    jobs[0](({}, DesiredModels()))
    assert len(begun) == 1
    parts.control.renew.assert_called_once()  # for the second round
    start.fetched(ModelsFetched(1))
    assert parts.control.renew.call_count == 2
