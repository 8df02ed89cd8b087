"""Takes GRPS messages itself: doubles tensors, and reverses everything else."""

from shmserve import grps


class Model:
    def infer(self, request):
        message = request.grps
        if message.gtensors:
            doubled = [grps.Tensor.of(t.name, t.array * 2) for t in message.gtensors]
            return grps.Message(gtensors=doubled)
        if message.str_data is not None:
            return grps.Message(str_data=message.str_data[::-1])
        return grps.Message(bin_data=bytes(message.bin_data or b"")[::-1])
