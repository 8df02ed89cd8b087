"""Step call: a request to a plain model, and the tensors passed between steps of an ensemble."""

from msgspec import Struct

from shmserve.core.memory.slots import Slot
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import OutputTensor
from shmserve.dispatch.pool.forwarded_outputs import ForwardedOutput
from shmserve.protocol.control.data_messages import Descriptor, RegionRef, WireTensor


class StepTensor(Struct, frozen=True):
    """A tensor of an ensemble: in a slot of ours, in a slot of an executor (`ForwardedOutput`), or
    in client memory. Each holder has a lease on the slot."""

    datatype: str
    shape: tuple[int, ...]
    at: Slot | RegionRef

    def output(self, name: str) -> OutputTensor:
        """Return the tensor as an output of the request. The view is empty for client memory."""
        view = memoryview(b"") if isinstance(self.at, RegionRef) else self.at.view.toreadonly()
        return OutputTensor(name, self.datatype, self.shape, view)


class StepCall(Call):
    """A call of a plain model, whose inputs and outputs may also be tensors of an ensemble."""

    __slots__ = ()

    def add_tensor(self, name: str, tensor: StepTensor) -> None:
        """Add a tensor as an input, without copying. Inputs keep the order of calls."""
        at = tensor.at
        if isinstance(at, RegionRef):
            self.add_input(name, tensor.datatype, tensor.shape, at)
            return
        self._memory.lease(at)
        self._slots.append(at)
        descriptor = self._memory.descriptor(at)
        self._inputs.append(WireTensor(name, tensor.datatype, tensor.shape, descriptor))

    def give(self, name: str) -> StepTensor | None:
        """Return an output of the latest answer in place, with a lease. Return None for an unknown
        name. The bytes stay in place until the lease ends, even after this call is closed."""
        tensor = next((tensor for tensor in self._answer.outputs if tensor.name == name), None)
        if tensor is None:
            return None
        at: Slot | RegionRef = tensor.at if isinstance(tensor.at, RegionRef) else self._pass(tensor)
        if isinstance(at, Slot):
            self._memory.lease(at)
        return StepTensor(tensor.datatype, tensor.shape, at)

    def _pass(self, tensor: WireTensor) -> ForwardedOutput:
        at, pool = tensor.at, self._pool
        assert pool is not None
        assert isinstance(at, Descriptor)
        if tensor.alias >= 0:
            self._output(tensor)  # checks that the output lies within the aliased input
            return self._memory.pass_slot(self._slots[tensor.alias], at.offset, at.nbytes)
        lease, nbytes = (at.slot, at.generation), at.nbytes
        output = self._memory.pass_on(
            pool.segments.mapping(at), at, lambda: pool.release([lease], nbytes)
        )
        self._held.remove(lease)
        self._held_bytes -= nbytes
        return output
