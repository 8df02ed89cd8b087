"""Calls with tritonclient to models that call others: ``ADDRESS``. Prints PASS."""

import sys

import numpy as np
import tritonclient.http as library
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

(address,) = sys.argv[1:]
client = library.InferenceServerClient(address)


def ask(model: str, name: str) -> library.InferResult:
    arrays = {
        "MODEL_NAME": np.array([name.encode()], dtype=np.object_),
        "INPUT0": np.arange(16, dtype=np.int32).reshape(1, 16),
        "INPUT1": np.full((1, 16), 3, np.int32),
    }
    inputs = []
    for tensor, array in arrays.items():
        given = library.InferInput(tensor, array.shape, np_to_triton_dtype(array.dtype))
        given.set_data_from_numpy(array)
        inputs.append(given)
    outputs = [library.InferRequestedOutput("OUTPUT0"), library.InferRequestedOutput("OUTPUT1")]
    return client.infer(model, inputs, request_id="1", outputs=outputs)


for model in ("bls_sync", "bls_async"):
    result = ask(model, "simple")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0")[0], np.arange(16) + 3)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1")[0], np.arange(16) - 3)
    problem = ""
    try:
        ask(model, "nobody")
    except InferenceServerException as ex:
        problem = str(ex)
    assert "'nobody'" in problem, problem
client.close()
print("PASS")
