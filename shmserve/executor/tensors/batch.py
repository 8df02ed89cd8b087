"""Gathered batches: the inputs of several requests joined in memory, and the outputs split again.

Each gathered input is copied once, into a slot of the executor. If the backend reads on its GPU,
the rows of each request are copied to GPU memory instead, straight from where they lie. Outputs
that the model writes into offered slots stay there: each request's answer names its own rows, and
has a lease of its own on the slot. Outputs in GPU memory are copied out in parts, one for each
request.

While the answers are made, the batch itself has a lease on each slot, so the slot outlives answers
that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import field
from msgspec.structs import replace

from shmserve.core.memory.slots import Slot
from shmserve.errors import Internal, ShmserveError
from shmserve.executor.backend import Output, Response
from shmserve.executor.peers.frontend_connections import FrontendProcess
from shmserve.executor.tensors.device_rows import DeviceRows
from shmserve.executor.tensors.inputs import Input
from shmserve.executor.tensors.request import ExecutorRequest, Outputs, Watch, offset_within
from shmserve.executor.tensors.workspace import Offer, Workspace
from shmserve.protocol.control.data_messages import Execute, RegionRef, WireTensor
from shmserve.tensor.dtypes import DATATYPES


class BatchedOutputs(Outputs, eq=False, kw_only=True):
    """The outputs of one request of a batch. `offers`: slots that contain outputs of the whole
    batch; the batch has a lease on each while answers are made."""

    offers: dict[str, Offer]
    _shared: list[Slot] = field(default_factory=list)

    def _copy(self, output: Output) -> None:
        offer = self.offers.get(output.name)
        offset = None if offer is None else offset_within(output.array, offer.base)
        if offer is None or offset is None:
            super()._copy(output)
            return
        self._shared.append(offer.slot)
        self._add(output, offer.slot, offset, output.array.nbytes)

    def await_device(self, response: Response) -> None:
        """Do nothing: the batch has waited for all outputs at once
        (`GatheredBatch.taken_apart`)."""

    def lease(self) -> list[tuple[int, int]]:
        leases = super().lease()
        for slot in self._shared:
            self._request.workspace.memory.lease(slot)
            leases.append((slot.number, slot.generation))
        self.slots += self._shared
        return leases

    def undo(self) -> None:
        self._shared.clear()
        super().undo()


class GatheredBatch:
    """A batch of requests as a single request, for the outputs of all requests together. The
    requests' inputs agree in all but their first dimension. `rows`: number of rows of each request,
    in order."""

    def __init__(
        self, workspace: Workspace, messages: Sequence[Execute], on_device: bool = False
    ) -> None:
        """Reserve memory for the inputs of all requests. `on_device`: reserve on the instance's
        GPU, for inputs other than BYTES."""
        self.rows: list[int] = []
        self._workspace = workspace
        self._memory = workspace.memory
        self._first = messages[0]
        self._callers = tuple(dict.fromkeys(c for m in messages for c in m.callers))
        all_names = workspace.outputs
        self._outputs = tuple(dict.fromkeys(o for m in messages for o in m.outputs or all_names))
        self._rooms: dict[str, Slot | DeviceRows] = {}
        self._inputs: dict[str, Input | DeviceRows] = {}
        # bytes filled so far, by input
        self._filled = dict.fromkeys((tensor.name for tensor in self._first.inputs), 0)
        self._request: ExecutorRequest | None = None
        self._is_sealed = False
        try:
            for like in self._first.inputs:
                tensors = [t for m in messages for t in m.inputs if t.name == like.name]
                if on_device and DATATYPES[like.datatype].itemsize:
                    rows = sum(tensor.shape[0] for tensor in tensors)
                    self._rooms[like.name] = DeviceRows(like, rows, workspace.devices)
                else:
                    nbytes = sum(tensor.at.nbytes for tensor in tensors)
                    self._rooms[like.name] = self._memory.reserve(nbytes)
        except ShmserveError:
            self.close()
            raise

    def add(self, frontend: FrontendProcess, message: Execute) -> int:
        """Append the inputs of a request. Return the number of bytes copied by the processor. Raise
        ProtocolViolation if a descriptor leads outside of the frontend's segments. Raise
        ShmserveError if client memory cannot be used; the request is then no part of the batch."""
        filled = dict(self._filled)
        copied = 0
        for tensor in message.inputs:
            room, start = self._rooms[tensor.name], filled[tensor.name]
            filled[tensor.name] += tensor.at.nbytes
            if isinstance(room, DeviceRows):
                room.put(sum(self.rows), self._workspace.open(frontend, tensor))
                continue
            target = room.view[start : filled[tensor.name]]
            self._workspace.copy_input(frontend, tensor, target)
            copied += tensor.at.nbytes
        self._filled = filled
        self.rows.append(message.inputs[0].shape[0])
        return copied

    def request(self, watch: Watch) -> ExecutorRequest:
        """Return the request for the backend, once all requests are added."""
        first, count = self._first, sum(self.rows)
        for like in first.inputs:
            room, nbytes = self._rooms[like.name], self._filled[like.name]
            if isinstance(room, DeviceRows):
                room.arrive(count)
                self._inputs[like.name] = room
                continue
            at = RegionRef(0, 0, nbytes)  # not a slot of a frontend, so no answer can name it
            tensor = WireTensor(like.name, like.datatype, (count, *like.shape[1:]), at)
            view = room.view[:nbytes].toreadonly()
            name = self._workspace.spec.name
            self._inputs[like.name] = Input(tensor, view, name, self._workspace.devices)
        message = replace(
            first,
            parameters={},
            outputs=self._outputs,
            places=(),
            deadline_ns=0,
            callers=self._callers,
        )
        self._request = ExecutorRequest(self._workspace, message, self._inputs, watch)
        return self._request

    @property
    def offers(self) -> dict[str, Offer]:
        """Return the slots that the model was offered for its outputs."""
        assert self._request is not None
        return self._request.offers

    def take_counts(self) -> tuple[int, int]:
        """Return how many bytes of the gathered inputs were copied again, and how many went to a
        GPU."""
        return (0, 0) if self._request is None else self._request.take_counts()

    def taken_apart(self, responses: Sequence[Response]) -> list[Response]:
        """Split the backend's response: return for each request the rows of every output. The slots
        of the outputs are kept until the batch is closed. Raise Internal if the backend returned
        more or less than one response, or an output with another number of rows than the batch."""
        total = max(1, sum(self.rows))
        copied = [sum(r.copied for r in responses) * rows // total for rows in self.rows]
        taken = split(responses, partial(split_rows, sizes=self.rows), copied)
        if responses[0].error is not None:
            return taken
        if any(not isinstance(output.array, np.ndarray) for output in responses[0].outputs):
            assert self._request is not None
            Outputs(self._request).await_device(responses[0])
        self._is_sealed = True
        for offer in self.offers.values():
            self._memory.seal_and_lease(offer.slot)
        return taken

    def close(self) -> None:
        """Release all memory that no answer names and the model does not keep."""
        if self._request is not None and not self._is_sealed:
            self._request.drop_offers()
        elif self._request is not None:
            while self.offers:
                self._let_go(self.offers.popitem()[1])
        for name, room in self._rooms.items():
            tensor = self._inputs.get(name)
            if isinstance(room, DeviceRows):
                room.close()
            elif tensor is not None and tensor.is_held() and tensor.base is not None:
                self._workspace.hold(Offer(room, tensor.base))
                tensor.close()
            else:
                if tensor is not None:
                    tensor.close()
                self._memory.reclaim(room)
        self._rooms.clear()

    def _let_go(self, offer: Offer) -> None:
        if offer.is_held():
            self._workspace.hold(offer)
        self._memory.release(offer.slot.number, offer.slot.generation)


def split(
    responses: Sequence[Response], parts_of: Callable[[Output], list[Any]], copied: Sequence[int]
) -> list[Response]:
    """Return a response for each request of a batch. An error of the batch is the error of every
    request. `parts_of`: returns the parts of an output, one for each request. `copied`: number of
    bytes that were copied for each request."""
    if len(responses) != 1:
        raise Internal(f"the model gave {len(responses)} responses to 1 batch")
    response = responses[0]
    if response.error is not None:
        return [response] * len(copied)
    outputs = [(o.name, o.datatype, parts_of(o)) for o in response.outputs]
    return [
        Response(
            tuple(Output(name, datatype, parts[index]) for name, datatype, parts in outputs),
            parameters=response.parameters,
            copied=nbytes,
        )
        for index, nbytes in enumerate(copied)
    ]


def split_rows(output: Output, sizes: Sequence[int], what: str = "rows") -> list[Any]:
    """Split an output into consecutive parts of these sizes."""
    array, total = output.array, sum(sizes)
    if array.shape[:1] != (total,):
        shape = list(array.shape)
        raise Internal(
            f"output '{output.name}' has shape {shape}, but the batch has {total} {what}"
        )
    ends = accumulate(sizes)
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]
