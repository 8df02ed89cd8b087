"""scikit-learn backend (`sklearn`): models and pipelines in files of joblib or pickle.

Loading runs code of the file, so the service must allow model code.
"""

from __future__ import annotations

from shmserve.errors import ConfigError
from shmserve.executor.backend import Context
from shmserve.executor.backends import import_extra
from shmserve.executor.backends.estimators.matrix_backend import MatrixBackend, Methods


class SklearnBackend(MatrixBackend):
    """Runs any object with a method `predict`."""

    def open_model(self, path: str, context: Context) -> tuple[Methods, int | None]:
        spec = context.spec
        context.require_model_code(f"file '{spec.config.model_file}' is a pickle")
        import_extra("sklearn", spec.backend, spec.backend)
        model = import_extra("joblib", spec.backend, spec.backend).load(path)
        if not callable(getattr(model, "predict", None)):
            raise ConfigError(
                f"model '{spec.name}': file '{spec.config.model_file}' holds a"
                f" {type(model).__name__}, which cannot predict"
            )
        names = ("predict", "predict_proba")
        methods = {name: getattr(model, name) for name in names if hasattr(model, name)}
        columns = getattr(model, "n_features_in_", None)
        return methods, columns if isinstance(columns, int) else None
