"""Lane gate: makes all the checks of a frontend for requests that come over a lane.

A lane's request becomes an `Execute`, whose regions are the caller's own. An `Answer` becomes the
lane's answer, which contains the bytes of small outputs.
"""

from collections.abc import Callable, Hashable

from shmserve.config import Settings
from shmserve.core.caller import Caller, caller_number
from shmserve.core.regions import region_book
from shmserve.core.registry import Snapshot
from shmserve.core.scheduling.sequence_names import named_sequence, sequence_owner
from shmserve.errors import Code, DeadlineExceeded, InvalidArgument, ShmserveError, from_code
from shmserve.executor.peers.lane import InlineOutput, LaneCall
from shmserve.executor.peers.lane_plans import IN_MESSAGE, LanePlan, LanePlans
from shmserve.protocol import bounds
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.data_messages import (
    Answer,
    Descriptor,
    Execute,
    OutputPlace,
    RegionRef,
    WireTensor,
)
from shmserve.protocol.oip.model_signature import make_signature
from shmserve.protocol.oip.request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionWindow,
    check_parameters,
    refuse_duplicates,
)
from shmserve.protocol.oip.validation import (
    Find,
    check_inputs,
    check_outputs,
    refuse_decoupled,
)
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.channel import MAX_MESSAGE

Read = Callable[[Descriptor], memoryview]
Form = tuple[Hashable, Hashable]  # form of (inputs, outputs)
_MAX_FORMS = 64
_NEVER_NS = (1 << 63) - 1


class LaneGate:
    """Checks of lane requests to one model. `snapshot`: returns the current registry. `server_uid`:
    user id that the server runs as."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        snapshot: Callable[[], Snapshot],
        server_uid: int,
    ) -> None:
        self.spec = spec
        self._settings = settings
        self._server_uid = server_uid
        self._signature = make_signature(spec)
        self._timeout_ns = int(settings.request_timeout_s * 1e9)
        self._stream_ns = int(settings.stream_timeout_s * 1e9) or _NEVER_NS
        self._fitting: dict[Form, tuple[int, ...]] = {}  # results of `_check`, by form
        self._plans = LanePlans(snapshot)

    def admit(
        self, caller: Caller, message: wire.LaneRequest, now_ns: int
    ) -> tuple[Execute, LaneCall]:
        """Check a request. Return the loop's message and the record of the running request. Raise
        InvalidArgument or NotFound if the request does not fit the model, or names a region that is
        not the caller's. Raise Unimplemented if a decoupled model is asked for a single answer."""
        credit = self._credit(message) if self.spec.decoupled else 0
        plan, sequence = self._plans.find(caller.uid, message), None
        if plan is None:
            plan = self._plan(caller, message)
        inputs, inline = self._with_bytes(plan, message)
        timeout_ns, answer_ns = message.timeout_ns, self._timeout_ns
        if timeout_ns:
            if timeout_ns < 0:
                raise InvalidArgument(f"timeout_ns: {timeout_ns} is negative")
            answer_ns = min(timeout_ns, answer_ns)
        deadline_ns = ends_ns = now_ns + answer_ns
        if credit:
            ends_ns = now_ns + min(timeout_ns or _NEVER_NS, self._stream_ns)
        if message.parameters:
            owner = sequence_owner(caller, self._settings.shared_sequences)
            sequence = named_sequence(message.parameters, owner)
        execute = Execute(
            message.number,
            message.id,
            inputs,
            plan.outputs,
            message.parameters,
            now_ns,
            deadline_ns,
            places=plan.places,
            credit=credit,
            caller_number=plan.caller_number,
            sequence=sequence,
        )
        copied_in = plan.inline_bytes
        call = LaneCall(inline, now_ns, deadline_ns, copied_in, credit, answer_ns, ends_ns)
        return execute, call

    def _plan(self, caller: Caller, message: wire.LaneRequest) -> LanePlan:
        """Check all but the bytes of a request, and return the plan; raises as `admit`. The plan is
        kept, unless the request has parameters, which are checked each time."""
        regions = self._plans.regions if _has_windows(message) else {}

        def find(spec: ModelSpec, window: RegionWindow | wire.LaneWindow) -> RegionRef:
            if spec.parameters.get("client_shm_mode") == "off":
                raise InvalidArgument(f"model '{spec.name}' takes no client shared memory")
            where = (window.region, window.offset, window.nbytes)
            region = region_book.find(regions, caller, *where, self._settings, self._server_uid)
            return RegionRef(region.number, window.offset, window.nbytes)

        form = _form(message)
        counts = None if message.parameters else self._fitting.get(form)
        if counts is None:
            counts = self._check(message, find)
            if not message.parameters:
                self._remember(form, counts)
        inputs = []
        for tensor in message.inputs:
            window = tensor.at if isinstance(tensor.at, wire.LaneWindow) else None
            at = IN_MESSAGE if window is None else find(self.spec, window)
            inputs.append(WireTensor(tensor.name, tensor.datatype, tensor.shape, at))
        outputs = message.outputs
        inline = {i: t.at for i, t in enumerate(message.inputs) if isinstance(t.at, bytes)}
        plan = LanePlan(
            tuple(inputs),
            bool(inline),
            sum(map(len, inline.values())),
            tuple([(index, counts[index]) for index in inline if counts[index] >= 0]),
            tuple([output.name for output in outputs]),
            tuple(
                [OutputPlace(o.name, find(self.spec, o.at)) for o in outputs if o.at is not None]
            ),
            caller_number("user", str(caller.uid)),
        )
        if not message.parameters:
            self._plans.keep(caller.uid, message, plan)
        return plan

    def _credit(self, message: wire.LaneRequest) -> int:
        """Return the number of answers of a stream that may be under way; raises as `admit`."""
        if not message.credit:
            refuse_decoupled(self._signature, "a lane's request without credit")
        windows = any(output.at is not None for output in message.outputs)
        limit = 1 if windows else wire.READ_AHEAD
        if not 0 < message.credit <= limit:
            reason = ", as a window holds one answer at a time" if windows else ""
            raise InvalidArgument(f"credit: {message.credit} is not from 1 to {limit}{reason}")
        return message.credit

    def _check(self, message: wire.LaneRequest, find: Find) -> tuple[int, ...]:
        """Check all but the bytes of a request; raises as `admit`. Return the number of elements
        of each BYTES input, and -1 for other inputs."""
        request = self._request(message)
        checked = check_inputs(self._signature, request, self._settings, find)
        check_outputs(self._signature, request, find)
        return tuple([-1 if i.signature.datatype.itemsize else i.count for i in checked])

    def _remember(self, form: Form, counts: tuple[int, ...]) -> None:
        """Remember a form that fits the model. Such a form is short: the model bounds its names
        and shapes."""
        if len(self._fitting) >= _MAX_FORMS:
            self._fitting.clear()
        self._fitting[form] = counts

    def _request(self, message: wire.LaneRequest) -> InferRequest:
        if (
            max(len(message.inputs), len(message.outputs), len(message.parameters))
            > bounds.MAX_INPUTS
        ):
            raise InvalidArgument(
                f"the request has {len(message.inputs)} inputs, {len(message.outputs)} outputs and"
                f" {len(message.parameters)} parameters, at most {bounds.MAX_INPUTS} of each"
                " are allowed"
            )
        check_parameters(message.parameters)
        refuse_duplicates("input", [tensor.name for tensor in message.inputs])
        refuse_duplicates("output", [output.name for output in message.outputs])
        return InferRequest(
            tuple([_input(tensor, index) for index, tensor in enumerate(message.inputs)]),
            tuple([_output(output) for output in message.outputs]),
            message.id,
            message.parameters,
            binary_output=True,
        )

    def _with_bytes(
        self, plan: LanePlan, message: wire.LaneRequest
    ) -> tuple[tuple[WireTensor, ...], tuple[bytes, ...]]:
        """Return the inputs, and the bytes of inputs that came in the message. Raise
        InvalidArgument if the bytes of a BYTES input do not fit the shape."""
        for index, count in plan.texts:
            tensor = message.inputs[index]
            assert isinstance(tensor.at, bytes)
            bytes_codec.check(memoryview(tensor.at), count, tensor.name, self.spec.name)
        if not plan.in_message:
            return plan.inputs, ()
        number = message.number
        inputs: list[WireTensor] = []
        inline: list[bytes] = []
        for tensor, planned in zip(message.inputs, plan.inputs, strict=True):
            data = tensor.at
            if isinstance(data, bytes):
                at = Descriptor(0, len(inline), number, 0, len(data))
                inline.append(data)
                inputs.append(WireTensor(planned.name, planned.datatype, planned.shape, at))
            else:
                inputs.append(planned)
        return tuple(inputs), tuple(inline)


def answered(answer: Answer, call: LaneCall, read: Read) -> wire.LaneAnswer:
    """Convert an answer for the lane. `read` returns the bytes of an output slot."""
    if answer.error_code:
        error = from_code(Code(answer.error_code), answer.error)
        if call.late and answer.error_code == Code.CANCELLED:
            error = DeadlineExceeded("the stream, or its next answer, came too late")
        return refused(answer.request, error, answer.final)
    outputs: list[wire.LaneTensor] = []
    total = 0
    for tensor in answer.outputs:
        data: bytes | memoryview | None = None
        if isinstance(tensor, InlineOutput):
            data = tensor.data
        elif not isinstance(tensor.at, RegionRef):
            data = _bytes(tensor, tensor.at, call, read)
        if data is not None:
            total += len(data)
            if len(data) >= wire.INLINE_BYTES or total > wire.INLINE_TOTAL:
                return refused(
                    answer.request,
                    InvalidArgument(
                        f"output '{tensor.name}' has {len(data)} bytes and no window of shared"
                        f" memory: less than {wire.INLINE_BYTES} of one output fit into the answer,"
                        f" and {wire.INLINE_TOTAL} of all"
                    ),
                    answer.final,
                )
        outputs.append(
            wire.LaneTensor(
                tensor.name, tensor.datatype, tensor.shape, None if data is None else bytes(data)
            )
        )
    timing, copied = answer.timing, answer.copied
    receipt = wire.LaneReceipt(
        timing.queue,
        timing.input + timing.infer + timing.output,
        copied.inputs + call.copied_in,
        copied.batch,
        copied.out + total,
        copied.device,
        call.copied_in + total,
    )
    call.copied_in = 0
    return wire.LaneAnswer(
        answer.request,
        tuple(outputs),
        parameters=answer.parameters,
        receipt=receipt,
        final=answer.final,
    )


def refused(number: int, error: ShmserveError, final: bool = True) -> wire.LaneAnswer:
    """Return the answer to a request that failed, or a failed answer of a stream."""
    return wire.LaneAnswer(number, (), error.http_status, error.code, error.message, final=final)


def encoded(reply: wire.LaneAnswer) -> bytes:
    """Encode an answer as one packet. An answer with names or parameters too long for a packet is
    replaced by an error."""
    data = wire.encode(reply)
    if len(data) > MAX_MESSAGE:
        error = ShmserveError("the answer is too long for one message")
        data = wire.encode(refused(reply.number, error, reply.final))
    return data


def _bytes(tensor: WireTensor, at: Descriptor, call: LaneCall, read: Read) -> memoryview:
    if tensor.alias < 0:
        return read(at)
    return memoryview(call.inline[tensor.alias])[at.offset : at.offset + at.nbytes]


def _form(message: wire.LaneRequest) -> Form:
    """Return everything but the parameters that decides whether a request fits the model."""
    inputs = [(t.name, t.datatype, t.shape, type(t.at), _nbytes(t.at)) for t in message.inputs]
    return tuple(inputs), tuple([(output.name, output.at is None) for output in message.outputs])


def _has_windows(message: wire.LaneRequest) -> bool:
    places = [tensor.at for tensor in message.inputs] + [output.at for output in message.outputs]
    return any(isinstance(at, wire.LaneWindow) for at in places)


def _nbytes(at: wire.LaneWindow | bytes | None) -> int:
    return at.nbytes if isinstance(at, wire.LaneWindow) else len(at or b"")


def _input(tensor: wire.LaneTensor, index: int) -> InferInput:
    where, at = f"inputs[{index}]", tensor.at
    if min(tensor.shape, default=0) < 0:
        raise InvalidArgument(f"{where}: the shape {list(tensor.shape)} has negative dimensions")
    if at is None:
        raise InvalidArgument(f"{where}: input '{tensor.name}' has no bytes")
    if not isinstance(at, bytes):
        window = RegionWindow(at.region, at.offset, at.nbytes)
        return InferInput(tensor.name, tensor.shape, tensor.datatype, where, region=window)
    if len(at) >= wire.INLINE_BYTES:
        raise InvalidArgument(
            f"{where}: input '{tensor.name}' has {len(at)} bytes in the message, which takes less"
            f" than {wire.INLINE_BYTES}: it must lie in a registered region"
        )
    return InferInput(tensor.name, tensor.shape, tensor.datatype, where, binary_size=len(at))


def _output(output: wire.LaneOutput) -> InferOutput:
    at = output.at
    window = None if at is None else RegionWindow(at.region, at.offset, at.nbytes)
    return InferOutput(output.name, binary=True, region=window)
