"""Python backend (`python`): loads model.py and finds out in which dialect it is written."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Protocol

from shmserve import model_places
from shmserve.errors import ConfigError, Internal
from shmserve.executor.backend import CPU, BatchForm, Context, Request, Response
from shmserve.executor.backends.model_errors import from_load
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


class Dialect(Protocol):
    """Way to write a model.py. `reads_on_device` and `batching` mean the same as in `Backend`, and
    are valid after `start`."""

    @property
    def reads_on_device(self) -> bool: ...

    @property
    def batching(self) -> BatchForm: ...

    def start(self, context: Context) -> ModelSpec: ...

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]: ...

    def close(self) -> None: ...


class PythonBackend:
    """Runs `TritonPythonModel` or `Model` of a model.py. `execute`: the dialect's `execute`, once
    the model is loaded. `reads_on_device`: True if the model wants its inputs on the instance's
    GPU. `batching`: how the model takes a batch."""

    chooses_device = False

    def __init__(self) -> None:
        self.device = CPU
        self.reads_on_device = False
        self.batching = BatchForm.ALONE
        self.execute: Callable[[Sequence[Request]], Sequence[Response]] = _not_loaded
        self._dialect: Dialect | None = None

    def load(self, context: Context) -> ModelSpec:
        try:
            dialect = self._dialect = _dialect(_import(context), context.spec)
            spec = dialect.start(context)
        except BaseException as ex:
            raise from_load(ex, _log, context.instance) from ex
        self.device = context.device
        self.reads_on_device = dialect.reads_on_device
        self.batching = dialect.batching
        self.execute = dialect.execute
        return spec

    def close(self) -> None:
        dialect, self._dialect = self._dialect, None
        self.execute = _not_loaded
        if dialect is None:
            return
        try:
            dialect.close()
        except BaseException as ex:  # an error does not keep the model loaded
            _log.warning("a model failed to close: %s", type(ex).__name__, exc_info=ex)


def _not_loaded(_: Sequence[Request]) -> Sequence[Response]:
    raise Internal("the model is not loaded")


def _import(context: Context) -> ModuleType:
    """Load the model's file as a module, with the model's folders importable."""
    # models of the Triton dialect import this by name; native models ignore it
    from shmserve.executor.backends.triton import pb_utils

    for alias in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules.setdefault(alias, pb_utils)
    spec = context.spec
    source = model_places.source_of(context.directory)  # of a model of one file, "" for others
    folder = os.path.dirname(source) or os.path.join(context.directory, spec.version)
    pb_utils.set_model_dir(folder)
    for path in (context.directory, folder):
        if path not in sys.path:
            sys.path.insert(0, path)
    file = spec.config.model_file
    # as in Triton: the version's folder is a package, so that `from . import helper` works
    package = ModuleType(spec.version)
    package.__path__ = [folder]
    sys.modules[spec.version] = package
    stem = file.removesuffix(".py").replace(".", "_")
    name = f"{spec.version}.{stem}"
    loader = _SourceLoader(name, source or os.path.join(folder, file))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=loader.path))
    module.__file__ = loader.path
    sys.modules[name] = module  # for dataclasses and pickling inside the model
    setattr(package, stem, module)  # for imports by name, as in `unittest.main(__name__)`
    loader.exec_module(module)
    return module


class _SourceLoader(SourceFileLoader):
    """Loader that always compiles: it neither writes nor trusts bytecode in the repository.

    Cached bytecode is matched by the file's size and time in seconds. So a model replaced twice
    within a second would be loaded in an old form. Tracebacks name the file without links, because
    links in the run directory lead to a model's own folder.
    """

    def get_code(self, fullname: str) -> CodeType:
        shown = os.path.realpath(self.path)
        code: CodeType = self.source_to_code(self.get_data(self.path), shown)
        return code


def _dialect(module: ModuleType, spec: ModelSpec) -> Dialect:
    triton = getattr(module, "TritonPythonModel", None)
    native = getattr(module, "Model", None)
    if isinstance(triton, type):
        from shmserve.executor.backends.triton.dialect import TritonDialect

        return TritonDialect(triton)
    if not isinstance(native, type) or not hasattr(native, "infer"):
        from shmserve.executor.backends.hinted.hinted_dialect import HintedDialect
        from shmserve.executor.backends.hinted.signatures import find_target

        target = find_target(module)
        if target is not None:
            return HintedDialect(target)
        if not isinstance(native, type):
            raise ConfigError(
                f"model '{spec.name}' has neither a class TritonPythonModel nor a class Model, "
                "nor a function or a class with a method predict"
            )
    if spec.decoupled:
        from shmserve.executor.backends.native.stream_dialect import NativeStreamDialect

        return NativeStreamDialect(native)
    from shmserve.executor.backends.native.dialect import NativeDialect

    return NativeDialect(native)
