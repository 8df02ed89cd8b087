"""What a project's converters derive from, and where they register."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Converter(ABC):
    """Turns messages into what the inferer takes, and what it gives into messages."""

    _path: Any = None
    _args: Any = None

    def init(self, path: Any = None, args: Any = None) -> None:
        """Called once, before the first request, with what inference.yml says."""
        self._path = path
        self._args = args

    @abstractmethod
    def preprocess(self, inp: Any, context: Any) -> Any:
        """A message to the inferer's input."""

    @abstractmethod
    def postprocess(self, inp: Any, context: Any) -> Any:
        """The inferer's output to a message."""

    def batch_preprocess(self, inps: list[Any], contexts: list[Any]) -> Any:
        """Several messages to one input; needed for dynamic batching only."""
        raise NotImplementedError("batch_preprocess")

    def batch_postprocess(self, inp: Any, contexts: list[Any]) -> list[Any]:
        """One output to as many messages; needed for dynamic batching only."""
        raise NotImplementedError("batch_postprocess")


class ConverterRegister:
    """Converters by the names that inference.yml uses."""

    def __init__(self) -> None:
        self.converter_dict: dict[str, Converter] = {}

    def register(self, name: str, converter: Converter) -> None:
        """Make a converter known."""
        self.converter_dict[name] = converter

    def get_converter(self, name: str) -> Converter:
        """The converter of that name."""
        return self.converter_dict[name]


converter_register = ConverterRegister()
