"""What a worker that takes GRPS messages builds its answers from.

from shmserve import grps

class Model:
    def infer(self, request):
        image = request.grps.tensor("image").array       # a view of shared memory
        return grps.Message(gtensors=[grps.Tensor.of("label", image.argmax(-1))])
"""

from shmserve.protocol.grps_message import DataType, Status, failure
from shmserve.protocol.grps_message import GenericMap as Map
from shmserve.protocol.grps_message import GenericTensor as Tensor
from shmserve.protocol.grps_message import GrpsMessage as Message

__all__ = ["DataType", "Map", "Message", "Status", "Tensor", "failure"]
