"""Stand-ins for called models: they give scripted answers, and record the requests."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.executor.calling import CallAnswer, CalledTensor, CallingRequest, ModelCall
from shmserve.protocol.control.data_messages import Parameter


class ScriptedCall:
    """Call that gives the scripted answers, and raises scripted errors; implements
    `calling.RunningCall`."""

    wanted = True

    def __init__(self, answers: Sequence[CallAnswer | ShmserveError]) -> None:
        self._answers = list(answers)
        self.ends: list[str] = []
        self.awaited = 0

    def next(self) -> CallAnswer | None:
        if not self._answers:
            return None
        answer = self._answers.pop(0)
        if isinstance(answer, ShmserveError):
            self._answers.clear()
            raise answer
        return answer

    def next_soon(self) -> Future[CallAnswer | None]:
        self.awaited += 1
        future: Future[CallAnswer | None] = Future()
        try:
            future.set_result(self.next())
        except ShmserveError as ex:
            future.set_exception(ex)
        return future

    def cancel(self) -> None:
        self.ends.append("cancelled")

    def abandoned(self) -> None:
        self.ends.append("abandoned")


class FakeOtherModels:
    """Implements `calling.OtherModels`. `script`: of every call."""

    def __init__(self, *script: CallAnswer | ShmserveError) -> None:
        self.script = script
        self.asked: list[ModelCall] = []
        self.calling: list[Sequence[CallingRequest]] = []
        self.calls: list[ScriptedCall] = []
        self.loaded: dict[str, Mapping[str, Parameter | bytes]] = {}
        self.settled = 0

    def begin(self, call: ModelCall, calling: Sequence[CallingRequest]) -> ScriptedCall:
        self.asked.append(call)
        self.calling.append(calling)
        self.calls.append(ScriptedCall(self.script))
        return self.calls[-1]

    def settle(self) -> None:
        self.settled += 1

    def is_ready(self, model: str, version: str = "") -> bool:
        return model in self.loaded and version in ("", "1")

    def load(self, model: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        if not model:
            raise InvalidArgument("Model name cannot be empty.")
        self.loaded[model] = parameters

    def unload(self, model: str, dependents: bool = False) -> None:
        if model not in self.loaded:
            raise InvalidArgument("there is no such model")
        del self.loaded[model]


def answer(*values: float) -> CallAnswer:
    """Return an answer with an FP32 output Y."""
    return CallAnswer((CalledTensor("Y", "FP32", np.array(values, np.float32)),))
