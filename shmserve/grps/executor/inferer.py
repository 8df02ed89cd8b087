"""Inferers: the base class of a project's inferers, and their register."""

from abc import ABC, abstractmethod
from typing import Any


class ModelInferer(ABC):
    """Inferer: runs a model. Without a converter, inputs and outputs are messages."""

    _path: Any = None
    _device: Any = None
    _args: Any = None

    @abstractmethod
    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Initialise with the values of inference.yml. Called once, before `load`."""
        self._path = path
        self._device = device
        self._args = args

    @abstractmethod
    def load(self) -> bool:
        """Load the model. Return False on failure."""

    @abstractmethod
    def infer(self, inp: Any, context: Any) -> Any:
        """Run one request."""

    def batch_infer(self, inp: Any, contexts: list[Any]) -> Any:
        """Run several requests at once. Needed for dynamic batching only."""
        raise NotImplementedError("batch_infer")


class InfererRegister:
    """Inferers by the names that inference.yml uses."""

    def __init__(self) -> None:
        self.model_inferer_dict: dict[str, ModelInferer] = {}

    def register(self, name: str, inferer: ModelInferer) -> None:
        """Register an inferer."""
        self.model_inferer_dict[name] = inferer

    def get_model_inferer(self, name: str) -> ModelInferer:
        """Return the inferer of this name."""
        return self.model_inferer_dict[name]


inferer_register = InfererRegister()
