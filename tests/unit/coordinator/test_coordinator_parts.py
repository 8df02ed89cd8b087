"""The coordinator's parts without sockets: the pool's size, desired models, tables."""

from collections.abc import Callable

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.coordinator import pool_sizing
from shmserve.coordinator.models import desired_models
from shmserve.coordinator.stats import admin_tables
from shmserve.errors import ConfigError
from shmserve.protocol.control.link_messages import AskStats, Instance, Shown
from shmserve.protocol.control.stats_messages import GpuReport
from shmserve.tensor.spec import ModelSpec

MIB = 1 << 20


def test_by_default_the_pool_is_half_of_what_there_is():
    assert pool_sizing.pool_size(0, 1000 * MIB, 900 * MIB, None) == (500 * MIB, "")
    assert pool_sizing.pool_size(0, 1000 * MIB, 900 * MIB, 600 * MIB) == (300 * MIB, "")


def test_a_pool_that_does_not_fit_is_told_in_one_sentence():
    pool, advice = pool_sizing.pool_size(800 * MIB, 1000 * MIB, 64 * MIB, None)
    assert pool == 800 * MIB
    assert "800 MiB" in advice
    assert "64 MiB free" in advice
    assert "--shm-size" in advice
    _, advice = pool_sizing.pool_size(800 * MIB, 1000 * MIB, 1000 * MIB, 1000 * MIB)
    assert "memory limit is 1000 MiB" in advice


class Folder(msgspec.Struct):
    specs: tuple[ModelSpec, ...]
    failures: dict[str, str] = {}

    def instances(self):
        return [Instance(f"{s.name}/{s.version}/0", s, "/x") for s in self.specs]


class Scan(msgspec.Struct):
    models: dict[str, Folder]
    failures: dict[str, str] = {}
    skipped: Callable[[], list[str]] = list


def spec(name, version="1", **fields):
    return ModelSpec(name, version, "", "python", 0, (), (), **fields)


def scanner(paths):
    models = {
        "a": Folder((spec("a", "1"), spec("a", "2")), {"3": "no model file"}),
        "b": Folder((spec("b"),)),
    }
    return Scan(models, {"broken": "config.pbtxt: line 1"})


def chosen(**settings):
    found = desired_models.choose(Settings(**settings), scanner)
    return [f"{s.name}/{s.version}" for s, _ in found.versions], found.failures


def test_with_control_none_everything_is_wanted():
    assert chosen() == (
        ["a/1", "a/2", "b/1"],
        {"broken": "config.pbtxt: line 1", "a/3": "no model file"},
    )


def test_with_explicit_control_only_what_was_named():
    assert chosen(model_control="explicit") == ([], {})
    assert chosen(model_control="explicit", load_models=("b", "nope")) == (
        ["b/1"],
        {"nope": "load_models: there is no such model in the repository"},
    )
    assert chosen(model_control="explicit", load_models=("*",)) == chosen()


def test_when_polling_everything_is_wanted():
    assert chosen(model_control="poll") == chosen()


def test_a_repository_that_cannot_be_read_is_a_failure_not_a_crash():
    def broken(paths):
        raise ConfigError("model_repository: 'x' is not a readable folder")

    found = desired_models.choose(Settings(), broken)
    assert found.failures == {"model_repository": "model_repository: 'x' is not a readable folder"}


def test_an_instance_too_large_for_a_message_is_a_failure():
    huge = spec("huge", parameters={"x": "x" * 200_000})
    found = desired_models.choose(Settings(), lambda paths: Scan({"huge": Folder((huge,))}))
    assert found == desired_models.DesiredModels((), {"huge/1": "its configuration is too large"})


def test_a_question_is_answered_when_all_have_or_time_is_up():
    sent = []
    questions = admin_tables.TableQueries(lambda process, message: sent.append((process, message)))
    questions.ask("cli-1-aa", 9, "slots", ["http-1-aa", "executor-1-bb", "cli-1-aa"], 0.0)
    assert sent == [("executor-1-bb", AskStats(1, "slots")), ("http-1-aa", AskStats(1, "slots"))]
    sent.clear()
    questions.answered("http-1-aa", 1, {"slots": [{"n": 1}, {"n": 2}]}, 0.1)
    questions.answered("http-1-aa", 1, {"slots": [{"n": 3}]}, 0.1)  # once is enough
    questions.answered("http-9-zz", 1, {"n": 4}, 0.1)  # was not asked
    assert sent == []
    questions.tick(1.0)
    rows = (
        {"process": "http-1-aa", "n": 1},
        {"process": "http-1-aa", "n": 2},
        {"process": "executor-1-bb", "error": "no answer"},
    )
    assert sent == [("cli-1-aa", Shown(9, rows))]
    assert len(questions) == 0


@pytest.mark.parametrize(
    ("what", "stats", "row"),
    [
        ("segments", {"segments": [[0, 4096]], "busy_ms": 0}, {"segment": 0, "bytes": 4096}),
        ("queues", {"queues": {"m/1/0": 2}}, {"instance": "m/1/0", "in_flight": 2}),
        ("queues", {"queued": 3, "arena": {"free": 1}}, {"queued": 3}),
    ],
)
def test_answers_of_every_form_become_rows(what, stats, row):
    sent = []
    questions = admin_tables.TableQueries(lambda process, message: sent.append(message))
    questions.ask("cli-1-aa", 9, what, ["http-1-aa"], 0.0)
    questions.answered("http-1-aa", 1, stats, 0.1)
    assert sent[-1] == Shown(9, ({"process": "http-1-aa", **row},))


def test_a_gpus_row_has_what_it_tells():
    gpus = (GpuReport("GPU-a", 0, "H200", 0.5, 1, 2, 41, 3.0, 4.0, 5.0), GpuReport("GPU-b", 1, ""))
    first, second = admin_tables.gpu_rows(gpus)
    assert list(first.values()) == [0, "H200", 0.5, 1, 2, 41, 3.0, 4.0, 5.0, "GPU-a"]
    assert second == {"gpu": 1, "name": "", "uuid": "GPU-b"}


def test_whoever_dies_is_not_waited_for():
    sent = []
    questions = admin_tables.TableQueries(lambda process, message: sent.append(message))
    questions.ask("cli-1-aa", 9, "queues", ["executor-1-bb"], 0.0)
    questions.gone("executor-1-bb", 0.1)
    assert sent[-1] == Shown(9, ())


def test_long_tables_come_in_parts():
    rows = [{"n": i, "text": "x" * 1000} for i in range(200)]
    parts = list(admin_tables.parts(1, rows))
    assert len(parts) > 1
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [row for part in parts for row in part.rows] == rows


@pytest.mark.parametrize(
    ("pool", "processes", "wanted", "largest", "size", "told"),
    [
        (1 << 30, 4, 32 << 20, None, 32 << 20, ""),
        (64 << 20, 7, 32 << 20, None, 4 << 20, ""),
        (32 << 20, 7, 32 << 20, None, 2 << 20, ""),
        (8 << 20, 7, 32 << 20, None, 1 << 20, "SHMSERVE_POOL_BYTES to 14680064"),
        (1 << 30, 4, 32 << 20, 32 << 20, 32 << 20, ""),
        (1 << 30, 4, 32 << 20, (16 << 20) + 1, 16 << 20, "may have 16 MiB at most"),
        (8 << 20, 7, 32 << 20, 2 << 20, 1 << 20, "SHMSERVE_POOL_BYTES"),
    ],
)
def test_first_segments_take_half_of_the_pool_at_most(pool, processes, wanted, largest, size, told):
    got, advice = pool_sizing.arena_size(pool, processes, wanted, largest)
    assert got == size
    assert told in advice
    assert bool(advice) is bool(told)


def test_memory_must_do_for_every_process():
    assert pool_sizing.shortage(7 * MIB, 100 * MIB, 7) == ""
    assert "too little for 7 processes" in pool_sizing.shortage(7 * MIB - 1, 100 * MIB, 7)
    assert "1024 KiB" in pool_sizing.shortage(100 * MIB, 1 * MIB, 7), "another's files are there"
