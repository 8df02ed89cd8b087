"""Inputs and outputs of an ONNX file, read without ONNX Runtime and without its weights.

Source: onnx.proto3 of ONNX. Types are written as by ONNX Runtime, such as
`seq(map(int64,tensor(float)))`. A session may serve a file that this reader does not understand,
and may give outputs other shapes than the file: ONNX Runtime infers shapes, and drops those that
contradict. So only the names and types of outputs count here, and only a file that no session can
load is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import overload

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.backends import graph_completion
from shmserve.executor.backends.graph_completion import GraphTensor
from shmserve.executor.backends.onnx import session
from shmserve.executor.backends.onnx.session import ELEMENTS
from shmserve.protocol.protobuf.wire import LEN, VARINT, Malformed, Uncommon, Walk, signed
from shmserve.tensor.spec import ModelSpec

_MAX_NESTING = 16  # sequences of maps of sequences
_MAX_FIELDS = 1_000_000  # a second or two of reading
_CHUNK = 16 << 10  # bytes of a read
# Fields of TypeProto
_TENSORS = {1: "tensor", 8: "sparse_tensor"}
_CONTAINERS = {4: "seq", 9: "optional"}
_MAP = 5
_DENOTATION = 6
_CONVERTED = ".ort"  # ONNX Runtime's own format
_UNDECIDED = (
    "max_batch_size is not set: a load chooses"
    f" {graph_completion.DEFAULT_MAX_BATCH_SIZE} if the first dimensions of all outputs are"
    " variable, as those of the inputs; max_batch_size in config.pbtxt allows other batches"
)


class Unclear(Exception):
    """A file that this reader does not understand, but a session may."""


class FileTensor(Struct, frozen=True):
    """Input or output, with the attributes that ONNX Runtime's have. `shape`: each a number, a
    symbol's name, or None; None instead of all if only a session tells the shape."""

    name: str
    type: str
    shape: tuple[int | str | None, ...] | None = None


class GraphFile(Struct, frozen=True):
    """Inputs and outputs of a graph, without inputs that have a default."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]


def check(spec: ModelSpec, directory: str) -> str:
    """Compare a version's file with its configuration, as far as the file tells. Return a note for
    operators, or "".

    `directory`: the model's folder. Raise ConfigError if the model cannot be loaded; the text may
    name the file's path.
    """
    path = session.model_path(spec, directory)
    if path.endswith(_CONVERTED):
        return ""
    try:
        graph = read(path)
    except Unclear:
        return ""
    except ConfigError as ex:
        raise ConfigError(f"{path} {ex.message}") from None
    except OSError as ex:
        raise ConfigError(f"{path} cannot be read ({ex.strerror})") from None
    inputs = session.graph_tensors(graph.inputs, spec.name, "input")
    outputs = session.graph_tensors(graph.outputs, spec.name, "output")
    config = spec.config
    if config.batch_input or config.batch_output or config.sequence_batching is not UNSET:
        return ""
    chosen = graph_completion.choose_batch(spec, inputs, outputs).max_batch_size
    undecided = chosen > config.max_batch_size  # the outputs of a session may forbid batches
    if undecided:
        inputs = _without_shapes(inputs)
    graph_completion.completed(spec, directory, inputs, outputs)
    return _UNDECIDED if undecided else ""


def _without_shapes(tensors: dict[str, GraphTensor]) -> dict[str, GraphTensor]:
    return {name: replace(tensor, has_dims=False) for name, tensor in tensors.items()}


def read(path: str) -> GraphFile:
    """Read an ONNX file. Raise ConfigError if the file is not an ONNX model, Unclear if only a
    session can tell, OSError if the file cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = _FileBytes(descriptor)
        if not len(data):
            raise ConfigError("is not an ONNX model (it is empty)")
        return _GraphReader(data).graph()
    except Uncommon as ex:
        raise Unclear(ex.problem) from None
    except Malformed as ex:
        raise ConfigError(f"is not an ONNX model ({ex.problem})") from None
    except InvalidArgument:
        raise Unclear("it has too many fields") from None
    finally:
        os.close(descriptor)


class _FileBytes:
    """Bytes of a file, read where they are asked for. A mapping instead would end the process with
    a signal if the file became shorter."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._start, self._chunk = 0, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> bytes: ...
    def __getitem__(self, place: int | slice) -> int | bytes:
        if isinstance(place, slice):
            return os.pread(self._descriptor, place.stop - place.start, place.start)
        offset = place - self._start
        if not 0 <= offset < len(self._chunk):
            self._start, offset = place, 0
            self._chunk = os.pread(self._descriptor, _CHUNK, place)
        return self._chunk[offset]  # IndexError at the file's end, as of bytes


class _GraphReader:
    """Reader of one file's messages, each given by its place in the file."""

    def __init__(self, data: _FileBytes) -> None:
        self._data = data
        self._walk = Walk(data, _MAX_FIELDS)  # type: ignore[arg-type]  # as good as bytes

    def graph(self) -> GraphFile:
        """Return the graph of a ModelProto. Several graphs are one, as protobuf merges them."""
        graphs = list(self._parts(0, len(self._data), 7))
        if not graphs:
            raise ConfigError("is not an ONNX model (it has no graph)")
        constants, inputs, outputs = set(), {}, []
        for place in graphs:
            for tag, start, stop in self._walk.fields(*place):
                if tag == 5 << 3 | LEN:
                    constants.add(self._name(start, stop, 8))
                elif tag == 15 << 3 | LEN:
                    constants.update(
                        self._name(*values, 8) for values in self._parts(start, stop, 1)
                    )
                elif tag == 11 << 3 | LEN:
                    inputs[self._name(start, stop)] = self._tensor(start, stop)
                elif tag == 12 << 3 | LEN:
                    outputs.append(replace(self._tensor(start, stop), shape=None))
        own = (tensor for name, tensor in inputs.items() if name not in constants)
        return GraphFile(tuple(own), tuple(outputs))

    def _parts(self, start: int, stop: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield the places of all values of a LEN field."""
        for tag, begin, end in self._walk.fields(start, stop):
            if tag == number << 3 | LEN:
                yield begin, end

    def _only(self, start: int, stop: int, number: int) -> tuple[int, int]:
        """Return the place of a message that protobuf would merge of several. Raise Unclear if
        there is none, or more than one."""
        parts = list(self._parts(start, stop, number))
        if len(parts) != 1:
            raise Unclear(f"field {number} occurs {len(parts)} times")
        return parts[0]

    def _name(self, start: int, stop: int, number: int = 1) -> bytes:
        """Return the last value of a field with a text, as protobuf does; b"" without a value."""
        name = b""
        for begin, end in self._parts(start, stop, number):
            name = self._data[begin:end]
        return name

    def _tensor(self, start: int, stop: int) -> FileTensor:
        """Return a ValueInfoProto."""
        name, place = self._name(start, stop), self._only(start, stop, 2)
        kind = self._type(*place)
        shapes = [shape for tensor in self._parts(*place, 1) for shape in self._parts(*tensor, 2)]
        if len(shapes) > 1:
            raise Unclear("it has shapes that ONNX Runtime merges")
        shape = self._shape(*shapes[0]) if shapes else None
        return FileTensor(name.decode(errors="replace"), kind, shape)

    def _type(self, start: int, stop: int, depth: int = 0) -> str:
        """Return the text of a TypeProto."""
        if depth == _MAX_NESTING:
            raise Unclear(f"has types in more than {_MAX_NESTING} others")
        kinds = [field for field in self._walk.fields(start, stop) if field[0] & 7 == LEN]
        kinds = [(tag >> 3, begin, end) for tag, begin, end in kinds if tag >> 3 != _DENOTATION]
        if len(kinds) != 1:
            raise Unclear("it has a type that ONNX Runtime infers or merges")
        number, begin, end = kinds[0]
        if number in _TENSORS:
            return f"{_TENSORS[number]}({self._element(begin, end)})"
        if number == _MAP:
            value = self._type(*self._only(begin, end, 2), depth + 1)
            return f"map({self._element(begin, end)},{value})"
        if number in _CONTAINERS:
            return f"{_CONTAINERS[number]}({self._type(*self._only(begin, end, 1), depth + 1)})"
        raise Unclear(f"it has a type of kind {number}")

    def _element(self, start: int, stop: int) -> str:
        """Return the name of the element type in field 1."""
        number = 0
        for tag, begin, _ in self._walk.fields(start, stop):
            if tag == 1 << 3 | VARINT:
                number = self._walk.varint(begin)
        if not number:
            raise Unclear("it has a type that ONNX Runtime infers")
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
                    dim = self._data[begin:end].decode(errors="replace")
            shape.append(dim)
        return tuple(shape)
