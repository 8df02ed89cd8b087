"""Inputs and outputs of an ONNX file, read without ONNX Runtime and without its weights.

Source: onnx.proto3 of ONNX. Types are written as by ONNX Runtime, such as
`seq(map(int64,tensor(float)))`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from msgspec import UNSET, Struct

from shmserve.errors import ConfigError
from shmserve.executor.backends.onnx import completion, session
from shmserve.executor.backends.onnx.session import ELEMENTS
from shmserve.protocol.protobuf.wire import LEN, VARINT, Malformed, Walk, signed
from shmserve.tensor.spec import ModelSpec

_MAX_NESTING = 16  # sequences of maps of sequences
# Fields of TypeProto
_TENSORS = {1: "tensor", 8: "sparse_tensor"}
_CONTAINERS = {4: "seq", 9: "optional"}
_MAP = 5
_MISSING = "undefined"
_CONVERTED = ".ort"  # ONNX Runtime's own format


class FileTensor(Struct, frozen=True):
    """Input or output, with the attributes that ONNX Runtime's have. `shape`: each a number, a
    symbol's name, or None. `has_shape`: False if only shape inference tells the rank."""

    name: str
    type: str
    shape: tuple[int | str | None, ...] = ()
    has_shape: bool = True


class GraphFile(Struct, frozen=True):
    """Inputs and outputs of a graph, without inputs that have a default."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]

    @property
    def has_shapes(self) -> bool:
        """True if the file tells all shapes."""
        return all(tensor.has_shape for tensor in (*self.inputs, *self.outputs))


def completed(spec: ModelSpec, directory: str) -> ModelSpec:
    """Return the spec as a load would complete it, or unchanged where the file does not tell.

    `directory`: the model's folder. Raise ConfigError if the model cannot be loaded; the text may
    name the file's path.
    """
    path = session.model_path(spec, directory)
    if path.endswith(_CONVERTED):
        return spec
    try:
        graph = read(path)
    except ConfigError as ex:
        raise ConfigError(f"{path} {ex.message}") from None
    except OSError as ex:
        raise ConfigError(f"{path} cannot be read ({ex.strerror})") from None
    inputs = session.graph_tensors(graph.inputs, spec.name, "input")
    outputs = session.graph_tensors(graph.outputs, spec.name, "output")
    config = spec.config
    wrapped = config.batch_input or config.batch_output or config.sequence_batching is not UNSET
    if wrapped or not graph.has_shapes:
        return spec
    return completion.completed(spec, directory, inputs, outputs)


def read(path: str) -> GraphFile:
    """Read an ONNX file. Raise ConfigError if the file is not an ONNX model, OSError if the file
    cannot be read."""
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _GraphReader(data).graph()
        except ValueError:  # an empty file cannot be mapped
            pass
        except Malformed as ex:
            raise ConfigError(f"is not an ONNX model ({ex.problem})") from None
    raise ConfigError("is not an ONNX model (it is empty)")


class _GraphReader:
    """Reader of one file's messages, each given by its place in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._walk = Walk(data)  # type: ignore[arg-type]  # as good as bytes

    def graph(self) -> GraphFile:
        """Return the graph of a ModelProto."""
        graphs = list(self._parts(0, len(self._data), 7))
        if len(graphs) != 1:
            raise ConfigError("is not an ONNX model (it has no graph)")
        constants, inputs, outputs = set(), [], []
        for tag, start, stop in self._walk.fields(*graphs[0]):
            if tag == 5 << 3 | LEN:
                constants.add(self._name(start, stop, 8))
            elif tag == 15 << 3 | LEN:
                constants.update(self._name(*values, 8) for values in self._parts(start, stop, 1))
            elif tag == 11 << 3 | LEN:
                inputs.append(self._tensor(start, stop))
            elif tag == 12 << 3 | LEN:
                outputs.append(self._tensor(start, stop))
        return GraphFile(tuple(i for i in inputs if i.name not in constants), tuple(outputs))

    def _parts(self, start: int, stop: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield the places of all values of a LEN field."""
        for tag, begin, end in self._walk.fields(start, stop):
            if tag == number << 3 | LEN:
                yield begin, end

    def _name(self, start: int, stop: int, number: int = 1) -> str:
        """Return the last value of a field with a text, as protobuf does; "" without a value."""
        name = ""
        for part in self._parts(start, stop, number):
            name = self._walk.text(*part, "a name")
        return name

    def _tensor(self, start: int, stop: int) -> FileTensor:
        """Return a ValueInfoProto."""
        name, kind, shapes = self._name(start, stop), _MISSING, []
        for place in self._parts(start, stop, 2):
            kind = self._type(*place)
            for tensor in self._parts(*place, 1):
                shapes = list(self._parts(*tensor, 2))
        shape = self._shape(*shapes[-1]) if shapes else ()
        return FileTensor(name, kind, shape, bool(shapes))

    def _type(self, start: int, stop: int, depth: int = 0) -> str:
        """Return the text of a TypeProto."""
        if depth == _MAX_NESTING:
            raise ConfigError(f"has types in more than {_MAX_NESTING} others")
        for tag, begin, end in self._walk.fields(start, stop):
            number = tag >> 3
            if number in _TENSORS:
                return f"{_TENSORS[number]}({self._element(begin, end)})"
            if number == _MAP or number in _CONTAINERS:
                parts = self._parts(begin, end, 2 if number == _MAP else 1)
                inner = [self._type(*place, depth + 1) for place in parts]
                text = inner[-1] if inner else _MISSING
                if number == _MAP:
                    return f"map({self._element(begin, end)},{text})"
                return f"{_CONTAINERS[number]}({text})"
        return _MISSING

    def _element(self, start: int, stop: int) -> str:
        """Return the name of the element type in field 1."""
        number = 0
        for tag, begin, _ in self._walk.fields(start, stop):
            if tag == 1 << 3 | VARINT:
                number = self._walk.varint(begin)
        return ELEMENTS.get(number, f"element type {number}")

    def _shape(self, start: int, stop: int) -> tuple[int | str | None, ...]:
        """Return a TensorShapeProto."""
        shape: list[int | str | None] = []
        for place in self._parts(start, stop, 1):
            dim: int | str | None = None
            for tag, begin, end in self._walk.fields(*place):
                if tag == 1 << 3 | VARINT:
                    dim = signed(self._walk.varint(begin))
                elif tag == 2 << 3 | LEN:
                    dim = self._walk.text(begin, end, "a dimension")
            shape.append(dim)
        return tuple(shape)
