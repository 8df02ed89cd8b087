"""PyTorch backend (`pytorch`): TorchScript models, and programs of `torch.export`.

Inputs are tensors on the bytes where they lie. torch has no read-only tensors, so an input that
the model might write into is copied first. TorchScript's alias analysis, made for its own
optimiser, tells at load which inputs cannot be written to. The graph of an exported program tells
the same. Outputs lie in torch's memory and are copied once by the executor, unless they are inputs
or views of inputs. On a GPU, the same holds for GPU memory and CUDA regions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError, Internal, InvalidArgument
from shmserve.executor.backend import CPU, BatchForm, Context, InputTensor, Request, Response
from shmserve.executor.backends import dlpack, import_extra
from shmserve.executor.backends.array_views import array_at
from shmserve.executor.backends.model_errors import from_cuda, from_exception, from_load
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.executor.backends.torch import arguments, exported
from shmserve.executor.backends.torch.arguments import require_tensors
from shmserve.protocol.triton_config.backend_kinds import EXPORTED
from shmserve.tensor.dtypes import object_array
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)
_BF16 = np.dtype(ml_dtypes.bfloat16)


class PytorchBackend:
    chooses_device = False
    batching = BatchForm.STACKED

    def __init__(self) -> None:
        self._model: Any = None
        self._ordinal: int | None = None  # GPU of the model; None: the CPU
        self._cleans_cache = False

    @property
    def device(self) -> str:
        """Device of the model's tensors."""
        return CPU if self._ordinal is None else device_name(self._ordinal)

    @property
    def reads_on_device(self) -> bool:
        """True if the model's tensors are on a GPU."""
        return self._ordinal is not None

    def load(self, context: Context) -> ModelSpec:
        spec = context.spec
        try:
            self._torch = import_extra("torch", "pytorch", "torch")
            if spec.decoupled:
                raise ConfigError(f"model '{spec.name}': backend 'pytorch' cannot be decoupled")
            self._ordinal = arguments.choose_device(self._torch, context)
            options = arguments.set_options(self._torch, spec, self.reads_on_device)
            self._mode, self._trial = options
            context.show_threads(self._trial.chosen)
            self._show_threads = context.show_threads
            self._cleans_cache = self.reads_on_device and arguments.cleans_cache(spec)
            path = os.path.join(context.directory, spec.version, spec.config.model_file)
            if path.endswith(EXPORTED):
                self._model = exported.opened(self._torch, path, self._ordinal, context)
                self._ordinal = self._model.ordinal
                spec, self._signature = self._model.completed(spec, context.directory)
            else:
                require_tensors(spec)
                self._model = self._script(path, spec)
                self._signature = arguments.signature(self._model, spec)
        except Exception as ex:
            raise from_load(ex, _log, context.instance) from ex
        self._spec = spec
        self._check = OutputCheck(model_side(spec))
        return spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._model = None

    def _script(self, path: str, spec: ModelSpec) -> Any:
        try:
            model = self._torch.jit.load(path, map_location=self.device)
        except (RuntimeError, ValueError) as ex:
            if from_cuda(ex, "model") is not None:
                raise
            _log.error("loading %s failed: %s", path, ex)
            raise ConfigError(
                f"model '{spec.name}': file '{spec.config.model_file}' is not a TorchScript model "
                "that this version of torch can read"
            ) from None
        model.eval()
        return model

    def _answer(self, request: Request) -> Response:
        try:
            with self._mode():
                result = self._timed(request) if self._trial.is_open else self._call(request)
                outputs = dict(self._named(result, request.requested))
            response = Response(outputs=self._check.answer(request.requested, outputs))
            if self._cleans_cache:
                self._torch.cuda.empty_cache()
            return response
        except Exception as ex:
            return Response(error=from_exception(ex, _log, "inference failed"))

    def _timed(self, request: Request) -> Any:
        """Run the model on the number of threads that the trial chooses, and record the time."""
        elements = sum(prod(tensor.shape) for tensor in request.inputs.values())
        count = self._trial.threads(elements)
        self._torch.set_num_threads(count)
        began = time.perf_counter()
        result = self._call(request)
        self._trial.ran(elements, count, time.perf_counter() - began)
        self._show_threads(self._trial.chosen)
        return result

    # ---------------------------------------------------------------- inputs

    def _call(self, request: Request) -> Any:
        signature = self._signature
        tensors = {name: self._tensor(tensor) for name, tensor in request.inputs.items()}
        if signature.as_dict:
            return self._model(tensors)
        if signature.positions is None:
            return self._model(**tensors)
        ordered: list[Any] = [None] * (max(signature.positions.values()) + 1)
        for name, place in signature.positions.items():
            ordered[place] = tensors.get(name)
        return self._model(*ordered)

    def _tensor(self, source: InputTensor) -> Any:
        if source.datatype == "BYTES":
            return _texts(source)
        writes = source.name in self._signature.writes
        if self.reads_on_device:
            near = source.private_on_device() if writes else source.on_device()
            return self._torch.from_dlpack(dlpack.export(near))
        if writes:
            array = source.private()
        else:
            view = source.numpy()
            # marked as writable, because from_numpy warns of read-only arrays; nothing writes here
            address = view.__array_interface__["data"][0]
            array = array_at(address, view.shape, view.dtype, view)
        if array.dtype == _BF16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    # --------------------------------------------------------------- outputs

    def _named(self, result: Any, wanted: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
        if isinstance(result, dict):
            for name in wanted:
                if name in result:
                    yield name, self._array(name, result[name])
            return
        is_several = isinstance(result, tuple | list) and not _is_texts(result)
        results = list(result) if is_several else [result]
        for name in wanted:
            place = self._signature.outputs.get(name)
            if place is None or place >= len(results):
                raise Internal(
                    f"model '{self._spec.name}': output '{name}' has place {place}, the model "
                    f"gave {len(results)}"
                )
            yield name, self._array(name, results[place])

    def _array(self, name: str, value: Any) -> Any:
        if _is_texts(value):
            return object_array(value, (len(value),))
        if not isinstance(value, self._torch.Tensor):
            raise Internal(
                f"model '{self._spec.name}': output '{name}' must be a tensor, "
                f"got {type(value).__name__}"
            )
        value = value.detach().resolve_conj().resolve_neg()
        if value.is_cuda:
            return dlpack.take(value)
        value = value.cpu()
        if value.dtype == self._torch.bfloat16:
            bits: np.ndarray = value.contiguous().view(self._torch.int16).numpy()
            return bits.view(_BF16)
        plain: np.ndarray = value.numpy()
        return plain


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(e, str) for e in value)


def _texts(source: InputTensor) -> list[str]:
    if len(source.shape) != 1:
        raise InvalidArgument(f"input '{source.name}': strings must have one dimension")
    try:
        return [element.decode() for element in source.numpy()]
    except UnicodeDecodeError:
        raise InvalidArgument(f"input '{source.name}' has an element that is not UTF-8") from None
