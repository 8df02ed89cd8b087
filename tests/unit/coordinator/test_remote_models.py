"""Questions of the coordinator to the fetcher, and the effect of silence."""

from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.coordinator.models.remote_models import RemoteModels
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.control.model_messages import FetchModels, ModelsFetched
from shmserve.tensor.spec import ModelSpec


class Sync:
    def __init__(self, *directories: str) -> None:
        spec = ModelSpec("m", "1", "python", "python", 0, (), ())
        self.instances = {d: Instance(f"m/1/{n}", spec, d) for n, d in enumerate(directories)}


class Desk:
    """The coordinator's side, with a record of messages sent and heard."""

    def __init__(self, *directories: str, **settings: Any) -> None:
        given = {"model_repository": ("s3://b/m",), "repository_cache_dir": "/c", **settings}
        self.sent: list[tuple[str, FetchModels]] = []
        self.heard: list[ModelsFetched] = []
        self.models = RemoteModels(
            Settings(**given),
            Sync(*directories),  # type: ignore[arg-type]
            lambda process, message: self.sent.append((process, message)),
        )
        self.models.on_round = self.heard.append

    def answer(self, problems: dict[str, str] | None = None, *unlisted: str) -> None:
        ticket = self.sent[-1][1].ticket
        self.models.answered(ModelsFetched(ticket, problems or {}, unlisted))


def test_without_addresses_nothing_is_asked() -> None:
    desk = Desk(model_repository=("/srv/models",))
    desk.models.tick(0.0)
    assert desk.sent == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("*",)),
        ({"model_control": "poll"}, ("*",)),
        ({"model_control": "explicit", "load_models": ("a", "b")}, ("a", "b")),
        ({"model_control": "explicit"}, ()),  # clients may ask for the repository's index
    ],
)
def test_the_first_round_is_for_all_that_is_wanted(settings, names) -> None:
    desk = Desk(**settings)
    desk.models.hello("f")
    desk.models.tick(0.0)
    assert [message.names for _, message in desk.sent] == [names]
    desk.answer()
    assert len(desk.heard) == 1


def test_it_is_asked_again_until_the_stores_were_reached_and_by_who_polls_ever_after() -> None:
    for control, asked in (("none", 2), ("poll", 3)):
        desk = Desk(model_control=control, poll_interval_s=10.0)
        desk.models.hello("f")
        desk.models.tick(0.0)
        desk.models.tick(5.0)
        assert len(desk.sent) == 1
        desk.answer({}, "s3://b/m: away")
        desk.models.tick(9.0)
        desk.models.tick(10.0)
        desk.answer()
        desk.models.tick(20.0)
        assert len(desk.sent) == asked


def test_a_successor_is_asked_again_and_told_what_must_stay() -> None:
    desk = Desk("/c/snapshots/d1/m", "/c/snapshots/d2/m", "/srv/models/m")
    desk.models.hello("f")
    desk.models.tick(0.0)
    desk.models.gone("f")
    desk.models.hello("g")
    assert [(to, m.names, m.keep) for to, m in desk.sent[2:]] == [
        ("g", (), ("d1", "d2")),
        ("g", ("*",), ("d1", "d2")),
    ]
    desk.answer()
    assert len(desk.heard) == 1
    desk.answer()  # twice: of no question any more
    assert len(desk.heard) == 1


def test_silence_ends_a_question() -> None:
    desk = Desk(repository_timeout_s=50.0, model_control="explicit")
    told: list[ModelsFetched] = []
    desk.models.fetch(("m",), 0.0, told.append)
    desk.models.tick(59.0)
    assert told == []
    desk.models.tick(60.0)
    assert [message.unlisted for message in told] == [("the fetcher does not answer",)]


def test_notices_are_of_the_latest_look_at_each_model() -> None:
    desk = Desk()
    desk.models.hello("f")
    desk.models.tick(0.0)
    desk.answer({"a": "bad", "b": "worse"})
    desk.models.fetch(("a",), 1.0, lambda message: None)
    desk.answer({})
    assert desk.models.notices == {"b": "worse"}
