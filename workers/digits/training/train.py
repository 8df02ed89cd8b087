"""Train the digits worker again: model, measured accuracy, sample request and sample image.

    pip install 'shmserve[train,onnx]'
    python workers/digits/training/train.py

scikit-learn's bundled data set (1797 images of 8x8, from the UCI repository) is split with a fixed
seed. A quarter is held out and measured with ONNX Runtime on the exported model, as it is served.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import sklearn
from onnx import TensorProto, helper
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

WORKER = Path(__file__).resolve().parent.parent
SEED = 20240229
OPSET = 17
IR_VERSION = 8
SAMPLE = 0  # index in the test set of the sample image


def train(images, labels):
    """Return a small network trained on grey values scaled to 0..1."""
    network = MLPClassifier(hidden_layer_sizes=(64,), alpha=0.01, max_iter=500, random_state=SEED)
    return make_pipeline(MinMaxScaler(), network).fit(images, labels)


def export(pipeline) -> onnx.ModelProto:
    """Return the pipeline as a graph that takes one [8, 8] image and gives [1] and [10]."""
    inner = convert_sklearn(
        pipeline,
        initial_types=[("rows", FloatTensorType([1, 64]))],
        options={id(pipeline): {"zipmap": False}},
        target_opset={"": OPSET, "ai.onnx.ml": 3},
    )
    graph = inner.graph
    label, probabilities = (output.name for output in graph.output)
    nodes = [
        helper.make_node("Reshape", ["image", "rows_shape"], ["rows"]),
        *graph.node,
        helper.make_node("Reshape", [label, "label_shape"], ["label_out"]),
        helper.make_node("Reshape", [probabilities, "probabilities_shape"], ["probabilities_out"]),
    ]
    # frees the outer names, which the inner graph uses too
    for node in nodes[1:-2]:
        node.output[:] = [_inner(name) for name in node.output]
        node.input[:] = [_inner(name) for name in node.input]
    for node in nodes[-2:]:
        node.input[0] = _inner(node.input[0])
        node.output[0] = node.output[0].removesuffix("_out")
    outer = wrapped(nodes, list(graph.initializer))
    model = helper.make_model(outer, opset_imports=list(inner.opset_import), ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def wrapped(nodes, constants) -> onnx.GraphProto:
    """Return the graph with the worker's inputs and outputs."""
    shapes = {"rows_shape": [1, 64], "label_shape": [1], "probabilities_shape": [10]}
    shape_constants = [
        helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape)
        for name, shape in shapes.items()
    ]
    return helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [8, 8])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [10]),
        ],
        [*constants, *shape_constants],
    )


def _inner(name: str) -> str:
    return f"inner_{name}" if name in ("label", "probabilities") else name


def accuracy(path: Path, images, labels) -> float:
    """Return the share of images that the exported model gets right."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    right = 0
    for image, label in zip(images, labels, strict=True):
        feed = {"image": image.reshape(8, 8).astype(np.float32)}
        found, probabilities = session.run(["label", "probabilities"], feed)
        assert found[0] == probabilities.argmax()
        right += int(found[0] == label)
    return right / len(labels)


def write_sample(image, label: int) -> None:
    """Write one image of the test set as a picture and as a request."""
    grey = image.reshape(8, 8).astype(int)
    rows = "\n".join(" ".join(f"{16 - value:2d}" for value in row) for row in grey)
    (WORKER / "sample.pgm").write_text(f"P2\n# a handwritten {label}\n8 8\n16\n{rows}\n")
    data = [[float(value) for value in row] for row in grey]
    request = {
        "inputs": [{"name": "image", "shape": [8, 8], "datatype": "FP32", "data": data}],
        "outputs": [{"name": "label"}, {"name": "probabilities"}],
    }
    (WORKER / "sample.json").write_text(json.dumps(request) + "\n")


def write_readme(result: float, trained: int, tested: int, size: int, label: int) -> None:
    text = f"""# digits

Reads one handwritten digit: input `image` FP32 [8, 8] with grey values 0 (white) to 16
(black), outputs `label` INT64 [1] and `probabilities` FP32 [10] (class names in
`labels.txt`, for the classification extension).

    curl -s http://127.0.0.1:8000/v2/models/digits/infer -d @workers/digits/sample.json

`sample.json` and `sample.pgm` are the same image of the test set, a {label}.

## Measured

Written by `training/train.py`, which made the model:

| | |
|---|---|
| accuracy on {tested} images it never saw | {result:.4f} ({round(result * tested)} right) |
| trained on | {trained} images (scikit-learn `load_digits`, split with seed {SEED}) |
| model | a network with one hidden layer of 64 units, {size} bytes, ONNX opset {OPSET} |
| made with | scikit-learn {sklearn.__version__}, onnx {onnx.__version__} |

The accuracy is that of the exported model in ONNX Runtime. The data set is the test part of
"Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository), which scikit-learn ships.
"""
    (WORKER / "README.md").write_text(text)


def main() -> None:
    digits = load_digits()
    trained, tested, labels, truth = train_test_split(
        digits.data, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target
    )
    model = export(train(trained, labels))
    path = WORKER / "1" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())
    result = accuracy(path, tested, truth)
    print(f"accuracy on {len(truth)} test images: {result:.4f}")
    write_sample(tested[SAMPLE], int(truth[SAMPLE]))
    write_readme(result, len(labels), len(truth), path.stat().st_size, int(truth[SAMPLE]))


if __name__ == "__main__":
    main()
