"""A client for programs on the server's own machine: arrays go through shared memory.

    import shmserve.client

    with shmserve.client.connect("unix:/run/shmserve/http.sock") as client:
        image = client.empty((8, 8), np.float32)  # optional: a place to produce in
        result = client.infer("digits", {"image": image})
        print(result["label"])

Needs numpy and msgspec, nothing else of the server's; for arrays on a GPU also CuPy, which is
imported when one is met. docs/client.md has the details.
"""

from shmserve.client.api import Client, connect
from shmserve.client.result import Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.wire.inference_error import InferenceError

__all__ = ["Client", "InferenceError", "Result", "ResultStream", "connect"]
