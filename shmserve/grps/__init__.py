"""What a worker that takes GRPS messages builds its answers from.

from shmserve.grps import projects as grps

class Model:
    def infer(self, request):
        image = request.grps.tensor("image").array       # a view of shared memory
        return grps.Message(gtensors=[grps.Tensor.of("label", image.argmax(-1))])

The packages below are GRPS's part of each process: `protocol` reads and writes messages, `frontend`
serves them over HTTP and gRPC, `executor` runs projects and workers that take messages,
`repository` reads projects. Nothing outside imports them; `shmserve.extensions` names them.
"""
