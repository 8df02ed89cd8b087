"""Client for programs on the server's own machine: arrays go through shared memory.

    import shmserve.client

    with shmserve.client.connect("unix:/run/shmserve/http.sock") as client:
        image = client.empty((8, 8), np.float32)  # optional: an array in shared memory
        result = client.infer("digits", {"image": image})
        print(result["label"])

The package needs only numpy and msgspec of the server's dependencies. CuPy is needed for arrays on
a GPU, and is imported at the first such array. See docs/client.md.
"""

from shmserve.client.api import Client, connect
from shmserve.client.result import Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.wire.inference_error import InferenceError

__all__ = ["Client", "InferenceError", "Result", "ResultStream", "connect"]
