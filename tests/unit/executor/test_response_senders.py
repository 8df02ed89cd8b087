"""Models that send responses by themselves, in both dialects."""

from __future__ import annotations

import builtins
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmserve.errors import ShmserveError
from shmserve.executor.backend import Response
from shmserve.testing.backend_runner import (
    FakeBackendRequest,
    FakeResponses,
    arrays,
    ask,
    ask_stream,
    load,
)
from shmserve.testing.backend_runner import failure as failure_of
from shmserve.testing.model_files import X_TO_Y as CONFIG
from shmserve.testing.model_files import Make, native, triton

X = np.arange(4, dtype=np.float32)
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"
FINAL = "pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
Y = "pb.InferenceResponse([pb.Tensor('Y', np.full(1, {}, np.float32))])"


def values(responses: FakeResponses) -> list[float]:
    assert responses.ended.wait(30)
    return [float(arrays(response)["Y"][0]) for response in responses.sent]


def told(responses: FakeResponses) -> str:
    """Return the error that ended a stream."""
    assert responses.ended.wait(30)
    (error,) = responses.errors
    return error.message


# ------------------------------------------------------ Triton dialect, decoupled

LOOP = f"""
for request in requests:
    sender = request.get_response_sender()
    assert sender is request.get_response_sender() and not sender.is_cancelled()
    for i in range(3):
        sender.send({Y.format("i")})
    sender.send(flags={FINAL})
return None
"""
THREAD = f"""
def work(sender):
    for i in range(3):
        sender.send({Y.format("i")})
    sender.send(response={Y.format("3")}, flags={FINAL})
thread = __import__("threading").Thread(target=work, args=(requests[0].get_response_sender(),))
thread.daemon = True
thread.start()
"""


def test_responses_from_execute_and_from_threads(make: Make) -> None:
    backend, spec = load(make(triton(LOOP), DECOUPLED))
    assert values(ask_stream(backend, spec, X=X)) == [0, 1, 2]
    backend, spec = load(make(triton(THREAD), DECOUPLED, "t"))
    assert values(ask_stream(backend, spec, X=X)) == [0, 1, 2, 3]


def test_execute_may_be_a_coroutine(make: Make) -> None:
    code = f"""
    import asyncio
    import numpy as np
    import triton_python_backend_utils as pb
    class TritonPythonModel:
        def initialize(self, args):
            self.both = None
            self.count = 0
        async def execute(self, requests):
            self.both = self.both or asyncio.Event()
            self.count += 1
            if self.count == 2:
                self.both.set()
            sender = requests[0].get_response_sender()
            await self.both.wait()  # until the other request has come, too
            sender.send({Y.format("self.count")})
            if requests[0].inputs()[0].as_numpy()[1] == 2:
                raise ValueError("on purpose")
            sender.send(flags={FINAL})
    """
    backend, spec = load(make(code, DECOUPLED))
    first, second = (ask_stream(backend, spec, X=X * factor) for factor in (1, 2))
    assert values(first) == [2]
    assert told(second).endswith("'m_0_0', message: ValueError: on purpose")
    backend.close()


def test_whatever_execute_gives_may_be_a_coroutine(make: Make) -> None:
    """An `execute` that returns a coroutine without being a coroutine function, and a coroutine
    that exits."""
    body = f"""
    async def answer(sender, x):
        if x == 2:
            raise SystemExit
        sender.send({Y.format("x")}, {FINAL})
    return answer(requests[0].get_response_sender(), requests[0].inputs()[0].as_numpy()[1])
    """
    backend, spec = load(make(triton(body), DECOUPLED))
    assert values(ask_stream(backend, spec, X=X)) == [1]
    assert "SystemExit" in told(ask_stream(backend, spec, X=X * 2))
    assert values(ask_stream(backend, spec, X=X * 3)) == [3]
    backend.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "return []",
            "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is "
            "using the decoupled mode and the execute function must return None.",
        ),
        ("return [pb.InferenceResponse([])]", "must return None."),
        ("raise ValueError('mine')", "model 'm_0_0', message: ValueError: mine"),
        ("return None", "abandoned"),
        ("requests[0].get_response_sender()", "abandoned"),
        (f"requests[0].get_response_sender().send({Y.format(1)})", "abandoned"),
        (
            "requests[0].get_response_sender().send()",
            "TritonModelException: Inference Response object must be provided when the response "
            "flags is set to zero.",
        ),
        ("requests[0].get_response_sender().send(5)", "must be an InferenceResponse, not int"),
        (
            "requests[0].get_response_sender().send(flags=7)",
            "Unable to send response. Unsupported flag provided.",
        ),
        ("pb.InferenceResponseSender()", "TypeError: InferenceResponseSender: No constructor"),
    ],
)
def test_streams_that_do_not_end_well(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(triton(body), DECOUPLED))
    assert reason in told(ask_stream(backend, spec, X=X))


def test_a_sender_in_a_cycle_is_found_by_the_collector(make: Make) -> None:
    body = "box = [requests[0].get_response_sender()]\nbox.append(box)"
    backend, spec = load(make(triton(body), DECOUPLED))
    responses = ask_stream(backend, spec, X=X)
    gc.collect()
    assert told(responses) == "abandoned"


TRIED = f"""
import builtins
def attempt(*arguments, **flags):
    try:
        sender.send(*arguments, **flags)
        tried.append("sent")
    except pb.TritonModelException as ex:
        tried.append(str(ex))
tried = builtins.tried = []
sender = requests[0].get_response_sender()
answer = {Y.format(1)}
"""
CLOSED = "Unable to send response. Response sender has been closed."
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
EMPTY = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)


@pytest.fixture
def tried() -> Iterator[Callable[[], list[str]]]:
    """Results recorded by a model that begins with `TRIED`."""
    yield lambda: builtins.tried  # type: ignore[attr-defined]
    del builtins.tried  # type: ignore[attr-defined]


def test_nothing_is_sent_after_the_final_flag(make: Make, tried: Callable[[], list[str]]) -> None:
    body = f"{TRIED}attempt(answer, {FINAL})\nattempt(answer)\nattempt(flags={FINAL})"
    backend, spec = load(make(triton(body), DECOUPLED))
    assert values(ask_stream(backend, spec, X=X)) == [1]
    assert tried() == ["sent", CLOSED, CLOSED]


def test_nothing_is_sent_after_a_decoupled_execute_has_failed(
    make: Make, tried: Callable[[], list[str]]
) -> None:
    body = TRIED + "attempt(answer)\nself.attempt = attempt, answer\nraise ValueError('mine')"
    more = "\n    def finalize(self):\n        self.attempt[0](self.attempt[1])\n"
    backend, spec = load(make(triton(body, more), DECOUPLED))
    responses = ask_stream(backend, spec, X=X)
    assert "mine" in told(responses)
    backend.close()
    assert tried() == ["sent", CLOSED]
    assert len(responses.sent) == 1


def test_bad_responses_and_errors_are_told_in_their_place(make: Make) -> None:
    body = f"""
sender = requests[0].get_response_sender()
sender.send(pb.InferenceResponse([pb.Tensor('Y', np.zeros(1, np.float32))] * 2))
sender.send(pb.InferenceResponse(error=pb.TritonError('gone', pb.TritonError.NOT_FOUND)))
sender.send(pb.InferenceResponse([]))
sender.send({Y.format(4)}, flags={FINAL})
"""
    backend, spec = load(make(triton(body), DECOUPLED))
    responses = ask_stream(backend, spec, X=X)
    assert responses.ended.wait(30)
    wrong, error, empty, good = responses.sent
    assert "twice" in failure_of(wrong).message
    assert failure_of(error).message == "gone"
    assert empty == Response()
    assert arrays(good)["Y"].tolist() == [4]


RESHAPED = """
backend: "python" max_batch_size: 2 model_transaction_policy { decoupled: true }
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [] } } ]
model_warmup [ { name: "w" batch_size: 1 inputs {
  key: "X" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } } ]
"""


@pytest.mark.parametrize("cold", [False, True])
def test_streams_are_reshaped_and_warmed_up(make: Make, cold: bool) -> None:
    body = f"""
sender = requests[0].get_response_sender()
x = requests[0].inputs()[0].as_numpy()
assert x.shape == (1, 2, 2), x.shape
if {cold}:
    sender.send(pb.InferenceResponse(error=pb.TritonError('too cold')))
sender.send(pb.InferenceResponse([pb.Tensor('Y', x.sum((1, 2)))]))
sender.send(flags={FINAL})
"""
    directory = make(triton(body), RESHAPED)
    if cold:
        with pytest.raises(ShmserveError, match="model_warmup 'w': too cold"):
            load(directory)
        return
    backend, spec = load(directory)
    responses = ask_stream(backend, spec, X=X[None])
    assert responses.ended.wait(30)
    assert [arrays(one)["Y"].tolist() for one in responses.sent] == [[[6.0]]]


# -------------------------------------------------- Triton dialect, one response


@pytest.mark.parametrize(
    "body",
    [
        f"s.send({Y.format(5)}, flags={FINAL})",
        f"s.send({Y.format(5)})\ns.send(flags={FINAL})",
        f"""
import threading, time
def work(sender):
    time.sleep(0.1)
    sender.send({Y.format(5)}, {FINAL})
threading.Thread(target=work, args=(s,)).start()
del s
""",
        f"s.send({Y.format(5)}, flags={FINAL})\nreturn [None]",
    ],
)
def test_ordinary_models_may_send_their_response(make: Make, body: str) -> None:
    backend, spec = load(make(triton("s = requests[0].get_response_sender()\n" + body)))
    for _ in range(2):
        assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [5]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            f"attempt(answer)\nattempt({Y.format(2)})\nattempt(flags={FINAL})",
            ["sent", SECOND, "sent"],
        ),
        (
            f"attempt(answer, {FINAL})\nattempt({Y.format(2)})\nattempt(flags={FINAL})",
            ["sent", SECOND, CLOSED],
        ),
        (f"attempt(flags={FINAL})\nattempt(answer, {FINAL})", [EMPTY, "sent"]),
        (f"attempt(answer)\nsender.send({Y.format(2)})", ["sent"]),
        (f"attempt(answer, {FINAL})\nreturn [{Y.format(2)}]", ["sent"]),
        (f"attempt(answer)\nreturn [{Y.format(2)}]", ["sent"]),
        (f"attempt(answer, {FINAL})\nraise ValueError", ["sent"]),
        (f"attempt(answer, {FINAL})\nreturn 5", ["sent"]),
        ("attempt(answer)\nself.kept = sender", ["sent"]),
    ],
)
def test_the_first_response_of_an_ordinary_model_is_its_answer(
    make: Make, tried: Callable[[], list[str]], body: str, told: list[str]
) -> None:
    backend, spec = load(make(triton(TRIED + body)))
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [1]
    assert tried() == told


@pytest.mark.parametrize(
    ("end", "told"),
    [("return [answer]", [SECOND, CLOSED]), ("raise ValueError('mine')", [CLOSED, EMPTY])],
)
def test_what_an_ordinary_model_sends_late_is_refused(
    make: Make, tried: Callable[[], list[str]], end: str, told: list[str]
) -> None:
    more = (
        "\n    def finalize(self):\n        attempt, answer = self.kept\n"
        f"        attempt(answer)\n        attempt(flags={FINAL})\n"
    )
    backend, spec = load(make(triton(f"{TRIED}self.kept = attempt, answer\n{end}", more)))
    response = ask(backend, spec, ("Y",), X=X)
    assert (response.error is None) is (told[0] is SECOND)
    backend.close()
    assert tried() == told


def test_one_failure_of_a_batch_leaves_what_others_were_sent(make: Make) -> None:
    body = f"requests[0].get_response_sender().send({Y.format(1)}, {FINAL})\nraise ValueError('x')"
    backend, _ = load(make(triton(body)))
    good, bad = backend.execute([FakeBackendRequest(("Y",), X=X), FakeBackendRequest(("Y",), X=X)])
    assert arrays(good)["Y"].tolist() == [1]
    assert "ValueError: x" in failure_of(bad).message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"s.send(flags={FINAL})", EMPTY),
        ("return None", "let go of the request"),
        ("return 5", "Expected a list in the execute return, found type '<class 'int'>'."),
    ],
)
def test_ordinary_models_that_send_nothing(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(triton("s = requests[0].get_response_sender()\n" + body)))
    assert reason in failure_of(ask(backend, spec, ("Y",), X=X)).message


def test_an_ordinary_response_that_never_comes_is_given_up(make: Make) -> None:
    backend, _ = load(make(triton("self.kept = requests[0].get_response_sender()")))
    request = FakeBackendRequest(("Y",), X=X)
    request.deadline_ns = 1
    (response,) = backend.execute([request])
    assert "in time" in failure_of(response).message


def test_an_ordinary_execute_may_be_a_coroutine(make: Make) -> None:
    body = """
    import asyncio
    await asyncio.sleep(0)
    x = pb.get_input_tensor_by_name(requests[0], "X").as_numpy()
    if x[0] == 7:
        raise SystemExit("as it was told")
    if x[0] == 8:
        raise ValueError("as it was told")
    return [pb.InferenceResponse([pb.Tensor("Y", x + 1)])]
    """
    code = triton(body).replace("def execute", "async def execute")
    backend, _ = load(make(code))
    for first in (1, 7, 8, 1):
        x = np.full(2, first, np.float32)
        (response,) = backend.execute([FakeBackendRequest(("Y",), X=x)])
        if first == 1:
            assert arrays(response)["Y"].tolist() == [2, 2]
        else:
            assert response.error is not None
    backend.close()


def test_a_waiting_coroutine_is_told_that_its_request_is_cancelled(make: Make) -> None:
    """The executor's own thread, which alone reads messages, looks while the coroutine waits."""
    body = """
    import asyncio
    while not requests[0].is_cancelled():
        await asyncio.sleep(0.001)
    return [pb.InferenceResponse(error=pb.TritonError("given up", pb.TritonError.CANCELLED))]
    """
    backend, _ = load(make(triton(body).replace("def execute", "async def execute")))
    request = LookedAt(("Y",), X=X)
    (response,) = backend.execute([request])
    assert failure_of(response).message == "given up"
    backend.close()


class LookedAt(FakeBackendRequest):
    """A request that is cancelled as soon as its creating thread has looked."""

    def __init__(self, *arguments: Any, **inputs: Any) -> None:
        self._thread = threading.get_ident()
        self._seen = False
        super().__init__(*arguments, **inputs)

    @property
    def cancelled(self) -> bool:
        self._seen = self._seen or threading.get_ident() == self._thread
        return self._seen

    @cancelled.setter
    def cancelled(self, value: bool) -> None: ...


# ------------------------------------------------------------- native dialect


def test_a_generator_yields_answers(make: Make) -> None:
    body = """
    for i in range(2):
        out = request.output("Y", (1,))
        out[:] = i
        yield
    yield {"Y": np.full(1, 2, np.float32)}
    """
    backend, spec = load(make(native(body), DECOUPLED))
    assert values(ask_stream(backend, spec, X=X)) == [0, 1, 2]


def test_a_generator_is_closed_when_its_request_is_cancelled(make: Make) -> None:
    body = """
    try:
        while True:
            yield {"Y": np.ones(1, np.float32)}
    finally:
        request.parameters["closed"] = True
    """
    backend, _ = load(make(native(body), DECOUPLED))
    request = FakeBackendRequest(("Y",), {}, X=X)
    request.responses = responses = FakeResponses()
    request.cancelled = True
    backend.execute([request])
    assert responses.ended.is_set()
    assert request.parameters == {"closed": True}
    assert len(responses.sent) == 1


def test_explicit_sends_from_a_thread(make: Make) -> None:
    body = """
    def work():
        for i in range(3):
            request.send({"Y": np.full(1, i, np.float32)})
        request.finish()
    __import__("threading").Thread(target=work).start()
    """
    backend, spec = load(make(native(body), DECOUPLED))
    assert values(ask_stream(backend, spec, X=X)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {'Y': request.input('X')}", "must yield"),
        ("yield {'Y': request.input('X')}\nraise ValueError('mine')", "mine"),
        ("return None", "abandoned"),
        ("request.finish()\nrequest.send({})", "CLOSED"),
    ],
)
def test_native_streams_that_do_not_end_well(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(native(body), DECOUPLED))
    if reason == "CLOSED":
        assert values(ask_stream(backend, spec, X=X)) == []  # told to the model, and logged
    else:
        assert reason in told(ask_stream(backend, spec, X=X))


def test_native_answers_are_checked_one_by_one(make: Make) -> None:
    body = "yield {'Q': 1}\nyield 5\nyield {'Y': np.ones(1, np.float32)}"
    backend, spec = load(make(native(body), DECOUPLED))
    responses = ask_stream(backend, spec, X=X)
    assert responses.ended.wait(30)
    assert "unknown output" in failure_of(responses.sent[0]).message
    assert "must return None or a dict" in failure_of(responses.sent[1]).message
    assert responses.sent[2].error is None
