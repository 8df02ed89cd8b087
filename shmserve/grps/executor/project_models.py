"""The models of a project: created, loaded, and run in the order of the dag."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from shmserve.errors import ConfigError, Internal, NotFound
from shmserve.grps.executor.batcher import Batcher
from shmserve.grps.executor.context import GrpsContext
from shmserve.grps.executor.converter import Converter, converter_register
from shmserve.grps.executor.inferer import ModelInferer, inferer_register
from shmserve.grps.executor.torch_inferer import TorchModelInferer, TorchTensorConverter
from shmserve.grps.repository.project_files import Project, ProjectModel

log = logging.getLogger(__name__)


class Model:
    """A model of a project: an inferer and, optionally, a converter."""

    def __init__(self, entry: ProjectModel, inferer: Any, converter: Any) -> None:
        self.name = entry.name
        self.inferer = inferer
        self.converter = converter
        self._batcher: Batcher | None = None
        if entry.batching is not None:
            if self._batches():
                self._batcher = Batcher(entry.batching, self._run_batch)
            else:
                log.warning("%s: no batch_infer, so requests run one by one", entry.name)

    def run(self, message: Any, context: GrpsContext) -> Any:
        """Return the output message, or None if the context has an error."""
        context.set_converter(self.converter)
        context.set_inferer(self.inferer)
        if self._batcher is not None:
            return self._batcher.infer(message, context, context.deadline_ns)
        if self.converter is None:
            return self.inferer.infer(message, context)
        value = self.converter.preprocess(message, context)
        if context.has_err():
            return None
        value = self.inferer.infer(value, context)
        return None if context.has_err() else self.converter.postprocess(value, context)

    def _batches(self) -> bool:
        """Return True if the project's code can run batches."""
        has_batch_infer = type(self.inferer).batch_infer is not ModelInferer.batch_infer
        kind = type(self.converter)
        return has_batch_infer and (
            self.converter is None
            or not isinstance(self.converter, Converter)
            or (
                kind.batch_preprocess is not Converter.batch_preprocess
                and kind.batch_postprocess is not Converter.batch_postprocess
            )
        )

    def _run_batch(self, messages: list[Any], contexts: list[Any]) -> list[Any]:
        if self.converter is None:
            return _listed(self.inferer.batch_infer(messages, contexts))
        value = self.converter.batch_preprocess(messages, contexts)
        if not all(context.has_err() for context in contexts):
            value = self.inferer.batch_infer(value, contexts)
        if all(context.has_err() for context in contexts):
            return [None] * len(contexts)
        return _listed(self.converter.batch_postprocess(value, contexts))


def _listed(messages: Any) -> list[Any]:
    if not isinstance(messages, list | tuple):
        raise Internal(f"a batch must give a list of messages, got {type(messages).__name__}")
    return list(messages)


class ProjectModels:
    def __init__(self, project: Project) -> None:
        """Load the models. Raises ConfigError, or any error of the project's code."""
        self._dag = project.dag
        _import_sources(project.root)
        used: set[str] = set()
        self._models = {entry.name: _loaded(entry, used) for entry in project.models}

    def run(self, message: Any, context: GrpsContext, name: str = "") -> Any:
        """Run the named model, or the dag. Return None if the context has an error.

        Raises:
            NotFound: the project has no model of this name.
            Exception: any error of the project's code.
        """
        if name and name not in self._models:
            raise NotFound(f"Model {name} not found.")
        for step in (name,) if name else self._dag:
            message = self._models[step].run(message, context)
            if context.has_err():
                return None
        return message

    def __contains__(self, name: str) -> bool:
        return name in self._models


def _import_sources(root: str) -> None:
    """Import the modules of `src`, whose inferers and converters register themselves."""
    sys.dont_write_bytecode = True  # write no bytecode into the repository
    if root not in sys.path:
        sys.path.insert(0, root)
    for name in ("customized_converter", "customized_inferer"):
        if os.path.isfile(os.path.join(root, "src", f"{name}.py")):
            importlib.import_module(f"src.{name}")


def _loaded(entry: ProjectModel, used: set[str]) -> Model:
    inferer = _instance(entry, "inferer", used)
    inferer.init(entry.inferer_path, entry.device, entry.inferer_args)
    if not inferer.load():
        raise ConfigError(f"model '{entry.name}' was not loaded: its inferer's load gave False")
    converter = None
    if entry.converter_type != "none":
        converter = _instance(entry, "converter", used)
        converter.init(entry.converter_path, entry.converter_args)
    return Model(entry, inferer, converter)


# part of a model -> class for TorchScript models, and objects registered by projects
_PARTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "inferer": (TorchModelInferer, inferer_register.model_inferer_dict),
    "converter": (TorchTensorConverter, converter_register.converter_dict),
}


def _instance(entry: ProjectModel, part: str, used: set[str]) -> Any:
    """Return the object for a model: the registered object on first use, later a new object of the
    same class."""
    of_torch, registered = _PARTS[part]
    if getattr(entry, f"{part}_type") == "torch":
        return of_torch()
    name = getattr(entry, f"{part}_name")
    instance = registered.get(name)
    if instance is None:
        raise ConfigError(
            f"model '{entry.name}': {part}_name '{name}' is not registered by src/customized_{part}"
        )
    key = f"{part} {name}"
    if key in used:
        return type(instance)()
    used.add(key)
    return instance
