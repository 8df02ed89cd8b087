"""What a project's inferers derive from, and where they register."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ModelInferer(ABC):
    """Runs a model. Without a converter it takes and gives messages."""

    _path: Any = None
    _device: Any = None
    _args: Any = None

    @abstractmethod
    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Called once, before `load`, with what inference.yml says."""
        self._path = path
        self._device = device
        self._args = args

    @abstractmethod
    def load(self) -> bool:
        """Load the model; False means that it could not be."""

    @abstractmethod
    def infer(self, inp: Any, context: Any) -> Any:
        """Run one request."""

    def batch_infer(self, inp: Any, contexts: list[Any]) -> Any:
        """Run several requests at once; needed for dynamic batching only."""
        raise NotImplementedError("batch_infer")


class InfererRegister:
    """Inferers by the names that inference.yml uses."""

    def __init__(self) -> None:
        self.model_inferer_dict: dict[str, ModelInferer] = {}

    def register(self, name: str, inferer: ModelInferer) -> None:
        """Make an inferer known."""
        self.model_inferer_dict[name] = inferer

    def get_model_inferer(self, name: str) -> ModelInferer:
        """The inferer of that name."""
        return self.model_inferer_dict[name]


inferer_register = InfererRegister()
