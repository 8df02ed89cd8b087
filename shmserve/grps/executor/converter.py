"""Converters: the base class of a project's converters, and their register."""

from abc import ABC, abstractmethod
from typing import Any


class Converter(ABC):
    """Converter from messages to inputs of the inferer, and from outputs to messages."""

    _path: Any = None
    _args: Any = None

    def init(self, path: Any = None, args: Any = None) -> None:
        """Initialise with the values of inference.yml. Called once, before the first request."""
        self._path = path
        self._args = args

    @abstractmethod
    def preprocess(self, inp: Any, context: Any) -> Any:
        """Convert a message to the inferer's input."""

    @abstractmethod
    def postprocess(self, inp: Any, context: Any) -> Any:
        """Convert the inferer's output to a message."""

    def batch_preprocess(self, inps: list[Any], contexts: list[Any]) -> Any:
        """Convert several messages to one input. Needed for dynamic batching only."""
        raise NotImplementedError("batch_preprocess")

    def batch_postprocess(self, inp: Any, contexts: list[Any]) -> list[Any]:
        """Convert one output to a message for each context. Needed for dynamic batching only."""
        raise NotImplementedError("batch_postprocess")


class ConverterRegister:
    """Converters by the names that inference.yml uses."""

    def __init__(self) -> None:
        self.converter_dict: dict[str, Converter] = {}

    def register(self, name: str, converter: Converter) -> None:
        """Register a converter."""
        self.converter_dict[name] = converter

    def get_converter(self, name: str) -> Converter:
        """Return the converter of this name."""
        return self.converter_dict[name]


converter_register = ConverterRegister()
