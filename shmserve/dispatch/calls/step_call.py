"""A request to the model of one step of an ensemble, and the tensors that pass between steps."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.memory.slots import Slot
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import OutputTensor
from shmserve.dispatch.pool.forwarded_outputs import ForwardedOutput
from shmserve.protocol.control.data_messages import Descriptor, RegionRef, WireTensor


class StepTensor(Struct, frozen=True):
    """A tensor of an ensemble: in a slot of ours, in another executor's (`ForwardedOutput`), or
    in client memory. Whoever has it has a lease on its slot."""

    datatype: str
    shape: tuple[int, ...]
    at: Slot | RegionRef

    def output(self, name: str) -> OutputTensor:
        """As an output of the request; its view is empty in client memory."""
        view = memoryview(b"") if isinstance(self.at, RegionRef) else self.at.view.toreadonly()
        return OutputTensor(name, self.datatype, self.shape, view)


class StepCall(Call):
    """A call whose inputs are tensors of an ensemble, and whose outputs become such."""

    def add_tensor(self, name: str, tensor: StepTensor) -> None:
        """An input that is in its place already. Inputs keep this order."""
        at = tensor.at
        if isinstance(at, RegionRef):
            self.add_region_input(name, tensor.datatype, tensor.shape, at)
            return
        self._memory.lease(at)
        self._slots.append(at)
        descriptor = self._memory.descriptor(at)
        self._inputs.append(WireTensor(name, tensor.datatype, tensor.shape, descriptor))

    def give(self, name: str) -> StepTensor | None:
        """An output of the latest answer, where it is, with a lease; None: there is none.

        It stays there until that is given back, whenever this call is closed.
        """
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
            self._output(tensor)  # that it lies within the input it names
            return self._memory.pass_slot(self._slots[tensor.alias], at.offset, at.nbytes)
        lease, nbytes = (at.slot, at.generation), at.nbytes
        output = self._memory.pass_on(
            pool.segments.mapping(at), at, lambda: pool.release([lease], nbytes)
        )
        self._held.remove(lease)
        self._held_bytes -= nbytes
        return output
