"""What a worker that takes GRPS messages builds its answers from.

from shmserve.grps import projects as grps

class Model:
    def infer(self, request):
        image = request.grps.tensor("image").array       # a view of shared memory
        return grps.Message(gtensors=[grps.Tensor.of("label", image.argmax(-1))])
"""

from shmserve.grps.protocol.message import DataType, Status, failure
from shmserve.grps.protocol.message import GenericMap as Map
from shmserve.grps.protocol.message import GenericTensor as Tensor
from shmserve.grps.protocol.message import GrpsMessage as Message

__all__ = ["DataType", "Map", "Message", "Status", "Tensor", "failure"]
