"""The response cache: hits, memory, and eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.dispatch.cache.response_cache import ResponseCache
from shmserve.dispatch.outcome import Outcome, OutputTensor, RunOptions
from shmserve.errors import ArenaExhausted, ModelFailure, ShmserveError
from shmserve.executor.backend import Output, Request, Response
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import EnsembleStep, ModelSpec
from tests.unit.dispatch.test_dispatch import slots_in_use, until
from tests.unit.rig import SPEC, Rig, feed

Array = np.ndarray[Any, Any]
CACHED = replace(SPEC, config=ConfigDocument("m", response_cache={"enable": True}))
SMALL, LARGE = np.arange(100, dtype=np.float32), np.arange(1 << 19, dtype=np.float32)  # 2 MiB


class Counting:
    """Adds one, counts the runs, and fails on demand."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, request: Request) -> Response:
        self.runs += 1
        array = request.inputs["IN"].numpy()
        if array[0] < 0:
            return Response(error=ModelFailure("as it was told"))
        return Response((Output("OUT", "FP32", array + 1),), parameters={"run": self.runs})


def ask(rig: Rig, name: str, array: Array, **options: Any) -> tuple[Array, Any]:
    dispatcher = rig.dispatcher
    with dispatcher.call(dispatcher.ready_model(name), RunOptions(**options)) as call:
        feed(call, array)
        answer = call.execute()
        found = np.frombuffer(bytes(answer.outputs[0].view), np.float32)
        return found, answer.parameters.get("run")


def counts(rig: Rig, name: str = "m") -> tuple[int, int, int]:
    """Answered, found, not found."""
    row = rig.counts()[name, "1"]
    return row.succeeded, row.cache[0], row.cache[2]


def outcome(array: Array) -> Outcome:
    return Outcome((OutputTensor("OUT", "FP32", array.shape, array.data.cast("B")),), {})


def make_room(rig: Rig, nbytes: int, count: int) -> None:
    """Make memory for `count` tensors in advance."""
    memory = rig.dispatcher.memory
    for slot in [memory.reserve(nbytes) for _ in range(count)]:
        memory.reclaim(slot)


def test_a_miss_never_waits_for_memory(rig_with) -> None:
    rig = rig_with(response_cache_bytes=32 << 20)
    rig.serve(Counting(), spec=CACHED)
    memory, cache, asked = rig.dispatcher.memory, rig.dispatcher._cache, []
    until(lambda: memory.held_bytes, "the first segment is not made")

    def deny(_: Any, nbytes: int) -> Any:
        asked.append(nbytes)
        raise ArenaExhausted("as it was told")

    with pytest.MonkeyPatch.context() as patch:
        grow = cache.grow
        patch.setattr(ResponseCache, "grow", lambda _: None)  # of the maintenance thread
        patch.setattr(type(memory), "reserve", deny)
        assert cache.put(b"key", (), ("m", "1"), outcome(LARGE)) == 0
        grow()
    assert asked == [LARGE.nbytes]
    # A later caller finds the entry made once memory is free
    until(lambda: cache.put(b"key", (), ("m", "1"), outcome(LARGE)) > 0, "none is made for it")


def test_an_answer_beyond_the_limit_is_not_copied(rig_with) -> None:
    rig = rig_with()
    rig.serve(Counting(), spec=CACHED)
    make_room(rig, SMALL.nbytes, 1)
    cache = ResponseCache(rig.dispatcher.memory, LARGE.nbytes + 512)  # not of the bytes alone
    assert cache.put(b"key", (), ("m", "1"), outcome(LARGE)) == 0
    for number in range(4):
        cache.put(b"%d" % number, (), ("m", "1"), outcome(SMALL))
    assert cache.nbytes > 4 * (SMALL.nbytes + 1024)
    cache.evict(1 << 30)
    assert slots_in_use(rig) == 0


def test_an_answer_of_another_revision_is_not_given_and_goes_for_the_next(rig_with) -> None:
    rig = rig_with()
    rig.serve(Counting(), spec=CACHED)
    make_room(rig, SMALL.nbytes, 2)
    cache = ResponseCache(rig.dispatcher.memory, 1 << 20)
    assert cache.put(b"key", ("m/1@1",), ("m", "1"), outcome(SMALL))
    assert cache.get(b"key", ("m/1@2",)) is None
    assert cache.put(b"key", ("m/1@2",), ("m", "1"), outcome(SMALL))
    assert cache.by_model()["m", "1"][0] == 1
    assert cache.get(b"key", ("m/1@1",)) is None
    answer = cache.get(b"key", ("m/1@2",))
    cache.evict(1 << 30)
    assert slots_in_use(rig) == 1, "a reader has its lease"
    answer.give_back()
    assert slots_in_use(rig) == 0


def test_what_ran_while_its_model_was_loaded_anew_is_not_kept(rig_with) -> None:
    rig = rig_with(response_cache_bytes=1 << 20)
    cache = rig.dispatcher._cache
    assert cache is not None

    def reload(request: Request) -> Response:
        again = tuple(replace(e, name=e.name + "@2") for e in entry.instances)
        models = {"m": {"1": replace(entry, instances=again)}}
        rig.writer.publish(Snapshot("cafe0123", 0, models=models, complete=True))
        return Response((Output("OUT", "FP32", request.inputs["IN"].numpy()),))

    entry = rig.serve(reload, spec=CACHED)
    ask(rig, "m", SMALL)
    assert cache.nbytes == 0
    ask(rig, "m", SMALL)
    assert cache.nbytes > 0


@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
def test_an_answer_is_given_again_without_its_executor(rig_with, array: Array) -> None:
    rig, model = rig_with(response_cache_bytes=32 << 20), Counting()
    entry = rig.serve(model, spec=CACHED)
    make_room(rig, array.nbytes, 6)
    for _ in range(3):
        found, run = ask(rig, "m", array)
        assert np.array_equal(found, array + 1)
        assert run == 1
    assert ask(rig, "m", array + 1)[1] == 2
    assert ask(rig, "m", array, parameters={"x": 1})[1] == 3
    assert ask(rig, "m", array, parameters={"priority": 1}, request_id="7")[1] == 1
    assert counts(rig) == (6, 3, 3)
    (row,) = rig.dispatcher._stats("cache")["cache"]
    assert row.pop("bytes") > 3 * array.nbytes
    assert row == {"model": "m", "version": "1", "answers": 3, "hits": 3, "misses": 3}
    again = [replace(e, name=e.name + "@2") for e in entry.instances]  # loaded anew
    models = {"m": {"1": replace(entry, instances=tuple(again))}}
    rig.writer.publish(Snapshot("cafe0123", 0, models=models, complete=True))
    assert ask(rig, "m", array)[1] == 4
    until(lambda: slots_in_use(rig) == 3, "more is held than what is kept")


def test_nothing_is_kept_that_was_not_asked_for(rig_with) -> None:
    rig, model = rig_with(), Counting()
    rig.serve(model, spec=CACHED)  # the server keeps none
    assert [ask(rig, "m", SMALL)[1] for _ in range(2)] == [1, 2]
    assert counts(rig) == (2, 0, 0)


def test_errors_are_not_kept_and_neither_is_what_nobody_can_know(rig_with) -> None:
    rig, model = rig_with(response_cache_bytes=1 << 20), Counting()
    rig.serve(model, spec=CACHED)
    for _ in range(2):
        with pytest.raises(ModelFailure):
            ask(rig, "m", -SMALL - 1)
    assert model.runs == 2
    with rig.dispatcher.call(rig.dispatcher.ready_model("m")) as call:
        call.add_input("IN", "FP32", (1,), RegionRef(7, 0, 4))
        with pytest.raises(ShmserveError):
            call.execute()
    assert counts(rig) == (0, 0, 2)
    assert slots_in_use(rig) == 0


def test_memory_is_bounded_and_given_up_for_requests(rig_with) -> None:
    rig, model = rig_with(response_cache_bytes=9 << 20, budget=1 << 20), Counting()
    rig.serve(model, spec=CACHED)
    rig.coordinator.budget = 14 << 20
    cache = rig.dispatcher._cache
    make_room(rig, LARGE.nbytes, 5)
    for number in range(8):  # each takes an input and an answer of 2 MiB
        assert ask(rig, "m", LARGE + number)[1] == number + 1
    assert 0 < cache.nbytes <= 9 << 20
    assert ask(rig, "m", LARGE + 7)[1] == 8
    with rig.dispatcher.call(rig.dispatcher.ready_model("m")) as call:
        for _ in range(5):  # more than is left beside the answers
            call.reserve(2 << 20)
    held = rig.dispatcher.memory.held_bytes
    rig.dispatcher._trim(64 << 20)
    assert cache.nbytes == 0
    assert rig.dispatcher.memory.held_bytes < held


def test_an_answer_that_is_being_sent_outlives_its_eviction(rig_with) -> None:
    rig, model = rig_with(response_cache_bytes=1 << 20), Counting()
    rig.serve(model, spec=CACHED)
    ask(rig, "m", SMALL)
    dispatcher = rig.dispatcher
    with dispatcher.call(dispatcher.ready_model("m")) as call:
        feed(call, SMALL)
        (out,) = call.execute().outputs
        give_back = call.lend()
    dispatcher._trim(1 << 20)
    for number in range(1, 20):
        ask(rig, "m", SMALL + number)
    assert np.array_equal(np.frombuffer(out.view, np.float32), SMALL + 1)
    give_back()
    dispatcher._trim(1 << 20)
    assert slots_in_use(rig) == 0


def step(model: str, takes: str, gives: str) -> EnsembleStep:
    return EnsembleStep(model, "1", {"IN": takes}, {"OUT": gives})


@pytest.mark.parametrize("cached", ["a", "b", "e"])
def test_ensembles_and_their_steps_keep_what_they_are_told_to(rig_with, cached: str) -> None:
    rig = rig_with(response_cache_bytes=1 << 20)

    def spec(name: str, **changes: Any) -> ModelSpec:
        cache: dict[str, Any] = {"response_cache": {"enable": True}} if name == cached else {}
        return replace(SPEC, name=name, config=ConfigDocument(name, **cache), **changes)

    a, b = Counting(), Counting()
    rig.serve(a, spec=spec("a"))
    rig.serve(b, spec=spec("b"))
    steps = (step("a", "IN", "mid"), step("b", "mid", "OUT"))
    whole = spec("e", platform="ensemble", steps=steps)
    rig.models["e"] = {"1": ModelEntry(whole, ModelState.READY)}
    rig.writer.publish(Snapshot("cafe0123", 0, models=rig.models, complete=True))
    for _ in range(3):
        assert np.array_equal(ask(rig, "e", SMALL)[0], SMALL + 2)
    assert (a.runs, b.runs) == {"a": (1, 3), "b": (3, 1), "e": (1, 1)}[cached]
    assert counts(rig, cached) == (3, 2, 1)
    assert counts(rig, "e")[0] == 3
    until(lambda: not rig.dispatcher.memory.forwarded, "outputs are still passed on")
    until(lambda: slots_in_use(rig) == 1, "more is held than what is kept")


def test_what_ran_while_an_ensemble_in_it_was_wired_anew_is_not_kept(rig_with) -> None:
    rig = rig_with(response_cache_bytes=1 << 20)
    cache = rig.dispatcher._cache
    assert cache is not None

    def ensemble(name: str, model: str, **outputs: str) -> ModelEntry:
        config = ConfigDocument(name, response_cache={"enable": name == "e"})
        steps = (EnsembleStep(model, "1", {"IN": "IN"}, {"OUT": "OUT", **outputs}),)
        spec = replace(SPEC, name=name, platform="ensemble", steps=steps, config=config)
        return ModelEntry(spec, ModelState.READY)

    def publish(inner: ModelEntry) -> None:
        rig.models |= {"inner": {"1": inner}, "e": {"1": ensemble("e", "inner")}}
        rig.writer.publish(Snapshot("cafe0123", 0, models=rig.models, complete=True))

    def rewire(request: Request) -> Response:
        publish(ensemble("inner", "a", MORE="more"))
        return Response((Output("OUT", "FP32", request.inputs["IN"].numpy()),))

    rig.serve(rewire, spec=replace(SPEC, name="a"))
    publish(ensemble("inner", "a"))
    ask(rig, "e", SMALL)
    assert cache.nbytes == 0, "the steps may have been either"
    ask(rig, "e", SMALL)
    assert cache.nbytes > 0
