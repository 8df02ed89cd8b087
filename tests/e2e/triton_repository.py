"""Write a typical repository of a Triton user into a folder."""

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto as T
from onnx import helper

from tests.unit.executor.test_onnx_backend import save, value

BATCHED = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert config["max_batch_size"] == 8
        told = pb_utils.get_output_config_by_name(config, "SUM")
        self.dtype = pb_utils.triton_string_to_numpy(told["data_type"])
        self.scale = float(config["parameters"]["scale"]["string_value"])
        self.runs = 0
        print("printed by", args["model_name"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            total = (a.sum(axis=1, keepdims=True) * self.scale).astype(self.dtype)
            runs = np.full((len(a), 1), self.runs, np.int32)
            tensors = [pb_utils.Tensor("SUM", total), pb_utils.Tensor("RUNS", runs)]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
            self.runs += 1
        return responses

    def finalize(self):
        pb_utils.Logger.log_info("finalized")
"""

BATCHED_CONFIG = """
name: "batched"
backend: "python"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [
  { name: "SUM" data_type: TYPE_FP64 dims: [ 1 ] },
  { name: "RUNS" data_type: TYPE_INT32 dims: [ 1 ] }
]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
parameters { key: "scale" value { string_value: "2" } }
optimization { input_pinned_memory { enable: true } }
model_warmup [
  { name: "zeros" batch_size: 2 count: 2
    inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } },
  { name: "file"
    inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 3 ] input_data_file: "a.raw" } } }
]
"""

COMPLETED = """
import numpy as np
import triton_python_backend_utils as pb_utils
from . import words


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        known = [entry["name"] for entry in config.as_dict()["input"]]
        if "TEXT" not in known:
            config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "REPLY", "data_type": "TYPE_STRING", "dims": [-1]})
        config.set_max_batch_size(0)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        replies = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            reply = np.array([words.GREETING + text.decode() for text in texts], dtype=np.object_)
            replies.append(pb_utils.InferenceResponse([pb_utils.Tensor("REPLY", reply)]))
        return replies
"""

COLOURS_CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 2
input [ { name: "X" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 1, 1 ]
          reshape { shape: [ 3 ] } } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "colours.txt" } ]
instance_group [ { count: 2 kind: KIND_AUTO } ]
optimization { graph { level: 1 } }
"""

VERSION = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        given = np.array([self.version], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("V", given)]) for _ in requests]
"""

VERSION_CONFIG = """
backend: "python"
version_policy { all {} }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "V" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""

PARTS_CONFIG = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]'


def write(root: Path) -> Path:
    """The repository's folder."""
    python(root, "batched", BATCHED, BATCHED_CONFIG)
    (root / "batched" / "warmup").mkdir()
    (root / "batched" / "warmup" / "a.raw").write_bytes(np.ones(3, np.float32).tobytes())
    python(root, "completed", COMPLETED)
    (root / "completed" / "1" / "words.py").write_text("GREETING = 'Hello, '\n")
    for version in (1, 2, 30):
        python(root, "versions", VERSION, VERSION_CONFIG, version)
    double = helper.make_node("Add", ["X", "X"], ["Y"])
    onnx(root, "bare", [double], [("X", T.FLOAT, ["N", 3])], [("Y", T.FLOAT, ["N", 3])])
    onnx(root, "colours", [double], [("X", T.FLOAT, ["N", 3])], [("Y", T.FLOAT, ["N", 3])])
    (root / "colours" / "config.pbtxt").write_text(COLOURS_CONFIG)
    (root / "colours" / "colours.txt").write_text("red\ngreen\nblue\n")
    found = helper.make_node("NonZero", ["X"], ["WHERE"])
    same = helper.make_node("Identity", ["X"], ["SAME"])
    ends = [("WHERE", T.INT64, [2, "K"]), ("SAME", T.FLOAT, ["N", "M"])]
    onnx(root, "dynamic", [found, same], [("X", T.FLOAT, ["N", "M"])], ends)
    (root / "dynamic" / "config.pbtxt").write_text(PARTS_CONFIG)
    twice = helper.make_node("Concat", ["T", "T"], ["U"], axis=0)
    onnx(root, "words", [twice], [("T", T.STRING, ["N"])], [("U", T.STRING, ["M"])])
    told = 'input [ { name: "T" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
    told += 'output [ { name: "U" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
    (root / "words" / "config.pbtxt").write_text(told)
    return root


def python(root: Path, name: str, code: str, config: str = "", version: int = 1) -> None:
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    if config:
        (root / name / "config.pbtxt").write_text(config)


def onnx(root: Path, name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> None:
    ends = ([value(*one) for one in side] for side in (inputs, outputs))
    save(root / name, nodes, *ends, config="")
