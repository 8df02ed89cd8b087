"""Receipt: what one request copied and how long each stage took.

A request with the header `shmserve-receipt: 1` gets its receipt in a response header of the same
name, and the times also as `Server-Timing`. Over gRPC both are metadata, and the receipt comes in
the trailers. The receipt counts copies of tensor bytes in user space, as `in` and `out`:

    client region in, client region out, model writes into the offered output    0
    the same, model returns an array of its own                                  1 (out)
    the same, BYTES or a window not aligned to its datatype                      1 each (in, out)
    the same, `client_shm_mode` copy                                             1 each (in, out)
    HTTP binary in              0: socket to slot. With TLS, besides decryption, up to 8 KiB of the
                                body that arrived with the head
    HTTP binary out             0: slot to socket, if the model wrote into the offered output or
                                returned (a part of) its input; 1 (out) for an array of its own
    gRPC in, out                1 each: message to slot, slot to message
    ModelInfer of 64 KiB and more, raw contents of 64 KiB and more, in
                                0: socket to slot. With TLS, or after a small call on the same
                                connection, up to 64 KiB that arrived with the message's head
    the same, out, neither side compressing                                      0: slot to socket
    from one step of an ensemble or pipeline to the next                         0
    from a model into a call of another                                          1 (in of that call)
    answer of the called model, as the caller sees it        0: a view. BYTES elements are copied
    GRPS message in, native worker           0 for FP32, FP64 and bytes; other tensors are widened
                                             on the wire, so they are converted in bulk
    GRPS message out, native worker                          1 (out), into the offered output
    JSON in                                                  1 (in), numbers to slot
    compressed in or out, chunked in, other WSGI workers     1
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.protocol.control.data_messages import Timing

UNTIMED = Timing()
_COUNTS = 10  # the first fields are sums


class Receipt(Struct):
    """Counts of one request, in bytes and nanoseconds.

    The frontend writes `copied_in`, `receive_ns` and `send_ns`; the executor's answer the rest.
    """

    copied_in: int = 0
    copied_batch: int = 0
    copied_out: int = 0
    copied_device: int = 0
    receive_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    send_ns: int = 0
    input_ns: int = 0  # part of `compute_ns`, as is `output_ns`
    output_ns: int = 0
    executor: str = ""
    timing: Timing = UNTIMED  # times of the latest answer
    complete: bool = False  # true once the whole answer has arrived

    def copy_in(self, nbytes: int) -> None:
        """Count bytes of the request copied into slots by the frontend."""
        self.copied_in += nbytes

    def copy_out(self, nbytes: int) -> None:
        """Count bytes of the answer copied by the frontend."""
        self.copied_out += nbytes

    def finish(self) -> None:
        """Mark the answer as complete."""
        self.complete = True

    def add(self, step: Receipt) -> None:
        """Add the receipt of a step of this request."""
        for field in self.__struct_fields__[:_COUNTS]:
            setattr(self, field, getattr(self, field) + getattr(step, field))
        known = self.executor.split(", ")
        new = [name for name in step.executor.split(", ") if name not in known]
        self.executor = ", ".join(filter(None, (self.executor, *new)))

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt in the form sent to clients."""
        return {
            "copied_bytes": {
                "in": self.copied_in,
                "batch": self.copied_batch,
                "out": self.copied_out,
                "device": self.copied_device,
            },
            "ns": {
                "receive": self.receive_ns,
                "queue": self.queue_ns,
                "compute": self.compute_ns,
                "send": self.send_ns,
            },
            "executor": self.executor,
        }
