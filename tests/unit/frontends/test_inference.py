"""The common driver of requests, with requests that fail at each step."""

import numpy as np
import pytest

from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import DeadlineExceeded, InvalidArgument, ModelFailure
from shmserve.frontends.inference import Inference, signature_of
from shmserve.protocol.oip.model_signature import ModelSignature
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher
from tests.fake_models import spec

ONES = np.ones(4, np.float32)


class Source:
    """A request whose steps fail with the given exceptions."""

    def __init__(self, check: Exception | None = None, fill: Exception | None = None) -> None:
        self.started_ns = 0
        self.nbytes = 0
        self.share: CallerShare | None = None
        self._check = check
        self._fill = fill

    def traceparent(self) -> str:
        return "00-1-2-01"

    def check(self, signature: ModelSignature) -> RunOptions:
        if self._check is not None:
            raise self._check
        return RunOptions("mine", timeout_s=3)

    def fill(self, call: InferenceCall) -> None:
        reservation = call.reserve(ONES.nbytes)
        if self._fill is not None:
            raise self._fill
        reservation.view[:] = ONES.data.cast("B")
        call.add_input("INPUT0", "FP32", ONES.shape, reservation)


class Waiting:
    """A client that records the call it waits for."""

    def __init__(self) -> None:
        self.calls: list[InferenceCall] = []

    def attach(self, call: InferenceCall) -> None:
        self.calls.append(call)

    def detach(self, call: InferenceCall) -> None:
        self.calls.remove(call)


@pytest.fixture
def dispatcher():
    return fake_models.dispatcher()


def test_an_answer_is_run_with_what_the_request_says(dispatcher: FakeDispatcher) -> None:
    client = Waiting()
    entry = dispatcher.ready_model("identity")
    with Inference(dispatcher, entry, Source(), client) as inference:  # type: ignore[arg-type]
        outcome = inference.run()
        assert bytes(outcome.outputs[0].view) == ONES.tobytes()
        assert len(client.calls) == 1
        inference.account.answered(5, 7)
    (call,) = dispatcher.calls
    assert (call.options.request_id, call.options.timeout_s) == ("mine", 3)
    assert (call.outcomes, call.closed, client.calls) == (["answered"], 1, [])
    assert call.receipt.receive_ns > 0
    assert (call.receipt.copied_out, call.receipt.send_ns) == (5, 7)


def test_a_request_that_does_not_fit_reserves_nothing(dispatcher: FakeDispatcher) -> None:
    entry = dispatcher.ready_model("identity")
    with pytest.raises(InvalidArgument):
        Inference(dispatcher, entry, Source(check=InvalidArgument("shape")))  # type: ignore[arg-type]
    assert dispatcher.refusals == [("identity", "InvalidArgument")]
    assert dispatcher.calls == []


def test_what_fails_on_the_way_in_is_counted_and_given_back(dispatcher: FakeDispatcher) -> None:
    client, source = Waiting(), Source(fill=DeadlineExceeded("late"))
    inference = Inference(dispatcher, dispatcher.ready_model("identity"), source, client)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded), inference:
        inference.run()
    (call,) = dispatcher.calls
    assert (call.outcomes, call.closed, client.calls) == (["DeadlineExceeded"], 1, [])
    assert dispatcher.refusals == []


def test_what_ends_before_it_is_run_is_counted_once(dispatcher: FakeDispatcher) -> None:
    inference = Inference(dispatcher, dispatcher.ready_model("identity"), Source())  # type: ignore[arg-type]
    with pytest.raises(ModelFailure), inference:
        raise ModelFailure("nobody runs it")
    assert dispatcher.refusals == [("identity", "ModelFailure")]
    assert dispatcher.calls == []


def test_a_signature_is_made_once_per_spec() -> None:
    first, second = spec("cached", "FP32", (-1,)), spec("cached", "FP32", (-1,))
    assert signature_of(first) is signature_of(first)
    assert signature_of(second) is not signature_of(first)


def test_signatures_of_models_that_are_gone_are_not_kept() -> None:
    first = signature_of(gone := spec("gone", "FP32", (-1,)))
    for number in range(1000):
        signature_of(spec(f"later{number}", "FP32", (-1,)))
    assert signature_of(gone) is not first
