"""GRPS: the types that a worker which takes GRPS messages builds its answers from.

from shmserve import grps

class Model:
    def infer(self, request):
        image = request.grps.tensor("image").array       # a view of shared memory
        return grps.Message(gtensors=[grps.Tensor.of("label", image.argmax(-1))])

Each process has a part of GRPS: `protocol` reads and writes messages, `frontend` serves messages
over HTTP and gRPC, `executor` runs projects and workers that take messages, `repository` reads
projects. No module outside imports these packages: `shmserve.extensions` names them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmserve.grps.protocol.grps_message import GenericMap as Map
    from shmserve.grps.protocol.grps_message import GenericTensor as Tensor
    from shmserve.grps.protocol.grps_message import GrpsDataType as DataType
    from shmserve.grps.protocol.grps_message import GrpsMessage as Message
    from shmserve.grps.protocol.grps_message import GrpsStatus as Status
    from shmserve.grps.protocol.grps_message import failure

__all__ = ["DataType", "Map", "Message", "Status", "Tensor", "failure"]
_NAMES = {
    "DataType": "GrpsDataType",
    "Map": "GenericMap",
    "Message": "GrpsMessage",
    "Status": "GrpsStatus",
    "Tensor": "GenericTensor",
    "failure": "failure",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: messages need numpy, not loaded by processes without models."""
    if name not in _NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from shmserve.grps.protocol import grps_message

    return getattr(grps_message, _NAMES[name])
