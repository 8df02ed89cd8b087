"""Calls with tritonclient to an ensemble: ``http|grpc ADDRESS``. Prints PASS."""

import importlib
import queue
import sys
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

protocol, address = sys.argv[1:]
library = importlib.import_module(f"tritonclient.{protocol}")
client = library.InferenceServerClient(address)
as_json = {"as_json": True} if protocol == "grpc" else {}

assert client.is_model_ready("diamond")
metadata = client.get_model_metadata("diamond", **as_json)
assert metadata["platform"] == "ensemble"
assert [output["name"] for output in metadata["outputs"]] == ["SUM", "DIFFERENCE", "DOUBLE"]
document = client.get_model_config("diamond", **as_json)
steps = document.get("config", document)["ensemble_scheduling"]["step"]
assert steps[3]["input_map"] == {"A": "l", "B": "r"}
rows = client.get_model_repository_index(**as_json)
assert "diamond" in {row["name"] for row in rows.get("models", [])} if as_json else rows

array = np.full(7, 60 if as_json else 70, np.float32)  # which tells the two branches apart
tensor = library.InferInput("IN", [7], "FP32")
tensor.set_data_from_numpy(array)
wanted = [
    library.InferRequestedOutput("DOUBLE"),
    library.InferRequestedOutput("SUM", class_count=1),
]
result = client.infer("diamond", [tensor], outputs=wanted, request_id="42")
np.testing.assert_array_equal(result.as_numpy("DOUBLE"), array * 2)
assert result.as_numpy("SUM")[0] == f"{array[0] * 4 + 11:f}:0".encode()
assert result.as_numpy("DIFFERENCE") is None
assert result.get_response(**as_json)["id"] == "42"

for model in ("diamond", "left"):
    stats = client.get_inference_statistics(model, **as_json)["model_stats"][0]
    assert int(stats["inference_stats"]["success"]["count"]) >= 1
    assert int(stats["inference_count"]) >= 1

cold = library.InferInput("IN", [1], "FP32")
cold.set_data_from_numpy(np.full(1, -5000, np.float32))
problem = ""
try:
    client.infer("diamond", [cold])
except InferenceServerException as ex:
    problem = str(ex)
assert "in ensemble 'diamond', " in problem, problem
assert "(step 'scale')" in problem, problem
if protocol == "grpc":
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    asked = library.InferInput("IN", [1], "FP32")
    asked.set_data_from_numpy(np.full(1, 3, np.float32))
    client.async_stream_infer("parts", [asked], request_id="7", enable_empty_final_response=True)
    found = []
    final = False
    while not final:
        answer, error = answers.get(timeout=30)
        assert error is None, error
        response = answer.get_response()
        final = response.parameters["triton_final_response"].bool_param
        assert (response.id, response.model_name) == ("7", "parts")
        if response.outputs:
            found += answer.as_numpy("OUT").tolist()
    assert found == [3, 5, 7], found
    client.stop_stream()
client.close()
print("PASS")
