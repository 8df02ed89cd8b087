"""Sum and difference of two vectors: the same code on a GPU and on the CPU."""

from shmserve.errors import InvalidArgument


class Model:
    device_tensors = True

    def __init__(self, context):
        self.xp = context.xp

    def infer(self, request):
        a, b = request.input("INPUT0"), request.input("INPUT1")
        if a.shape != b.shape:
            raise InvalidArgument(f"INPUT0 has {len(a)} elements, INPUT1 has {len(b)}")
        self.xp.add(a, b, out=request.output("OUTPUT0", a.shape))
        self.xp.subtract(a, b, out=request.output("OUTPUT1", a.shape))
