"""TorchScript models, and tensors of messages for them. Needs torch, an optional dependency."""

import os
from typing import Any

from shmserve._generated import grps_pb2
from shmserve.core.device_names import choose, device_name
from shmserve.errors import ConfigError, Internal, InvalidArgument
from shmserve.grps.executor.converter import Converter
from shmserve.grps.executor.inferer import ModelInferer
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import GenericTensor, GrpsMessage


def import_torch() -> Any:
    """Return the torch module.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError("torch is not installed (pip install 'shmserve[torch]')") from None
    return torch


def device_of(device: str) -> str:
    """Return torch's name for a device of inference.yml.

    Raises:
        ConfigError: there is no such device here.
    """
    kind, _, number = device.partition(":")
    number = number or "0"
    if kind in ("cuda", "gpu") and number.isdecimal():
        if not import_torch().cuda.is_available():
            raise ConfigError(f"device '{device}' needs a GPU, and torch sees none here")
        return device_name(choose(f"cuda:{number}", os.environ).ordinal)
    if device != "cpu":
        raise ConfigError(f"device '{device}' is not cpu, cuda, cuda:N, gpu or gpu:N")
    return device


class TorchTensorConverter(Converter):
    """Converter from tensors of a message to torch's tensors and back. Either all tensors have
    names, or none."""

    def preprocess(self, inp: Any, context: Any) -> Any:
        """Return a list of tensors, or a dict by name if the tensors have names."""
        torch = import_torch()
        message = message_wire.parse(inp.SerializeToString())
        tensors = message.gtensors or ()
        if not tensors:
            raise InvalidArgument("the message has no tensors")
        values = [torch.from_numpy(tensor.array.copy()) for tensor in tensors]
        names = [tensor.name for tensor in tensors]
        if not any(names):
            return values
        if not all(names) or len(set(names)) != len(names):
            raise InvalidArgument("either all tensors have names of their own or none has")
        return dict(zip(names, values, strict=True))

    def postprocess(self, inp: Any, context: Any) -> Any:
        """Return a message of outputs with their names, or named output, output_0, output_1 ..."""
        torch = import_torch()
        if isinstance(inp, torch.Tensor):
            named = {"output": inp}
        elif isinstance(inp, list | tuple):
            named = {f"output_{index}": tensor for index, tensor in enumerate(inp)}
        elif isinstance(inp, dict):
            named = inp
        else:
            raise Internal(f"the model gave {type(inp).__name__}, which is no tensor")
        tensors = [
            GenericTensor.of(name, tensor.detach().cpu().numpy()) for name, tensor in named.items()
        ]
        return grps_pb2.GrpsMessage.FromString(message_wire.encode(GrpsMessage(gtensors=tensors)))


class TorchModelInferer(ModelInferer):
    """Inferer for a TorchScript file."""

    _model: Any = None
    _inp_device = "cpu"

    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        super().init(path, device, args)
        torch = import_torch()
        requested = str(device or "cpu")
        if requested.startswith("original"):
            self._inp_device = device_of(requested.removeprefix("original_") or "cpu")
        else:
            self._device = self._inp_device = device_of(requested)
        for library in (args or {}).get("customized_op_paths") or ():
            torch.ops.load_library(library)

    def load(self) -> bool:
        torch = import_torch()
        if not self._path:
            raise ConfigError("inferer_path is missing")
        device = None if str(self._device).startswith("original") else self._device
        self._model = torch.jit.load(self._path, map_location=device)
        self._model.eval()
        return True

    def infer(self, inp: Any, context: Any) -> Any:
        torch = import_torch()
        if isinstance(inp, grps_pb2.GrpsMessage):  # no converter is configured
            converter = TorchTensorConverter()
            result = self.infer(converter.preprocess(inp, context), context)
            return converter.postprocess(result, context)
        with torch.no_grad():
            if isinstance(inp, dict):
                return self._model(**{name: self._placed(value) for name, value in inp.items()})
            if isinstance(inp, list | tuple):
                return self._model(*(self._placed(value) for value in inp))
            return self._model(self._placed(inp))

    def _placed(self, value: Any) -> Any:
        return value.to(self._inp_device) if hasattr(value, "to") else value
