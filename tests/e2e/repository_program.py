"""Calls of a Triton repository's user with tritonclient. Arguments: host:port.

Separate program, which ends with status 0 if every answer was as expected.
"""

import sys
from typing import Any

import numpy as np
import tritonclient.http as http


def text(*words: str) -> np.ndarray:
    return np.array([word.encode() for word in words], dtype=np.object_)


class Program:
    def __init__(self, url: str) -> None:
        self.client = http.InferenceServerClient(url)

    def infer(self, model: str, version: str = "", classes: int = 0, **arrays: Any) -> Any:
        inputs = []
        for name, array in arrays.items():
            kind = {"f": "FP32", "i": "INT32", "O": "BYTES"}[array.dtype.kind]
            inputs.append(http.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        wanted = [http.InferRequestedOutput("Y", class_count=classes)] if classes else None
        return self.client.infer(model, inputs, version, outputs=wanted)

    def batched(self) -> None:
        a = np.arange(12, dtype=np.float32).reshape(4, 3)
        result = self.infer("batched", A=a)
        assert result.as_numpy("SUM").tolist() == [[6], [24], [42], [60]]
        assert result.as_numpy("SUM").dtype == np.float64
        runs = result.as_numpy("RUNS")
        assert runs.tolist() == [[3]] * 4, f"warm-up ran {runs.tolist()} times"
        assert self.client.get_model_metadata("batched")["inputs"][0]["shape"] == [-1, 3]
        refused = self.refused("batched", A=np.zeros((9, 3), np.float32))
        assert "batch-size must be <= 8" in refused, refused

    def completed(self) -> None:
        reply = self.infer("completed", TEXT=text("Ada", "Zuse")).as_numpy("REPLY")
        assert reply.tolist() == [b"Hello, Ada", b"Hello, Zuse"]
        config = self.client.get_model_config("completed")
        assert config["backend"] == "python"
        assert config["input"][0]["data_type"] == "TYPE_STRING"

    def bare(self) -> None:
        x = np.ones((3, 3), np.float32)
        assert self.infer("bare", X=x).as_numpy("Y").tolist() == (2 * x).tolist()
        config = self.client.get_model_config("bare")
        assert config["max_batch_size"] == 4
        assert config["platform"] == "onnxruntime_onnx"
        assert config["output"][0]["dims"] == [3]

    def colours(self) -> None:
        x = np.array([[1, 3, 2], [0, 1, 9]], np.float32).reshape(2, 3, 1, 1)
        assert self.infer("colours", X=x).as_numpy("Y").tolist() == [[2, 6, 4], [0, 2, 18]]
        best = self.infer("colours", classes=1, X=x).as_numpy("Y")
        assert best.tolist() == [[b"6.000000:1:green"], [b"18.000000:2:blue"]], best
        entry = self.client.get_model_config("colours")["input"][0]
        assert (entry["format"], entry["reshape"]) == ("FORMAT_NCHW", {"shape": [3]})

    def dynamic(self) -> None:
        for x in (np.eye(2, dtype=np.float32), np.zeros((1, 5), np.float32)):
            result = self.infer("dynamic", X=x)
            assert result.as_numpy("WHERE").tolist() == [list(axis) for axis in np.nonzero(x)]
            assert result.as_numpy("SAME").tolist() == x.tolist()

    def words(self) -> None:
        words = self.infer("words", T=text("ab", "ö")).as_numpy("U").tolist()
        assert words == [b"ab", "ö".encode()] * 2, words

    def versions(self) -> None:
        assert self.infer("versions").as_numpy("V").tolist() == [30]
        for version in (1, 2, 30):
            assert self.infer("versions", str(version)).as_numpy("V").tolist() == [version]
        assert self.client.get_model_metadata("versions")["versions"] == ["1", "2", "30"]

    def refused(self, model: str, **arrays: Any) -> str:
        try:
            self.infer(model, **arrays)
        except http.InferenceServerException as ex:
            return str(ex)
        return "nothing was refused"


def main() -> None:
    program = Program(sys.argv[1])
    for name in ("batched", "completed", "bare", "colours", "dynamic", "words", "versions"):
        getattr(program, name)()
        print(name)


if __name__ == "__main__":
    main()
