"""One GRPS request and its answers, without a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, ModelFailure
from shmserve.frontends.oip.seam import Call, Outcome
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol.model_parameters import MODEL, STREAMING, takes_http, takes_message
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip.model_signature import ModelPlan

T = TypeVar("T")
OnWait = Callable[[], bool] | None


class Exchange:
    """A call whose inputs are in their slots. Close it after its answers were sent."""

    def __init__(
        self, call: Call, entry: ModelEntry, plan: ModelPlan, kind: str, model: str, streaming: bool
    ) -> None:
        self.call = call
        self.entry = entry
        self.plan = plan
        self.kind = kind
        self._parameters: dict[str, Parameter] = {}
        if takes_message(plan.spec) or takes_http(plan.spec):
            self._parameters = {STREAMING: streaming, MODEL: model}

    def once(self, make: Callable[[Outcome, bool], T], on_wait: OnWait = None) -> T:
        """What `make` makes of the one answer.

        `make` is told whether the outcome stays valid until the exchange is closed; if not
        it must copy what it keeps.

        Raises:
            ShmserveError: it failed, or there are more answers than one.
        """
        if not self.entry.spec.decoupled:
            outcome = self.call.execute(parameters=self._parameters, on_wait=on_wait)
            answer = make(outcome, True)
            self.call.answered()
            return answer
        made: list[T] = []
        for outcome in self.outcomes(on_wait):
            if made:
                raise InvalidArgument(
                    f"model '{self.entry.spec.name}' answers more than once: ask for streaming"
                )
            made.append(make(outcome, outcome.final))
            if outcome.final:
                break
        if not made:
            raise ModelFailure(f"model '{self.entry.spec.name}' gave no answer")
        self.call.answered()
        return made[0]

    def outcomes(self, on_wait: OnWait = None) -> Iterator[Outcome]:
        """The answers as they come; each is valid until the next is asked for.

        Raises:
            ShmserveError: the model failed, perhaps after some answers.
        """
        for outcome in self.call.stream(parameters=self._parameters, on_wait=on_wait):
            if outcome.error is not None:
                raise outcome.error
            if outcome.outputs:
                yield outcome

    def failed(self, ex: BaseException) -> None:
        """Give every slot back; there was no answer."""
        self.call.failed(ex)
        self.call.close()

    def close(self) -> None:
        """Give every slot back. May be called again."""
        self.call.close()


def kind_of(payload: Payload) -> str:
    """What a request asks with."""
    return "bin_data" if payload.body is not None else payload.message.which
