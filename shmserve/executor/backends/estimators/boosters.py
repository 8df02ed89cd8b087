"""Backends of boosters: XGBoost (`xgboost`) and LightGBM (`lightgbm`), from data files.

As in MLServer, a file of XGBoost becomes an estimator of the saved kind, and a file of LightGBM
becomes a booster, so `predict` gives probabilities.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shmserve.errors import ConfigError
from shmserve.executor.backend import Context
from shmserve.executor.backends import import_extra
from shmserve.executor.backends.estimators.matrix_backend import MatrixBackend, Methods
from shmserve.executor.backends.onnx.session import default_threads


class XgboostBackend(MatrixBackend):
    """Runs a model of `XGBModel.save_model` or `Booster.save_model`."""

    def open_model(self, path: str, context: Context) -> tuple[Methods, int | None]:
        xgboost = import_extra("xgboost", "xgboost", "xgboost")
        import_extra(
            "sklearn", "xgboost", "xgboost"
        )  # of which XGBoost's estimators are subclasses
        model = self._estimator(xgboost, path, context)
        names = ["predict"]
        if isinstance(model, xgboost.XGBClassifier):
            names.append("predict_proba")
        columns = model.get_booster().num_features()
        return {name: getattr(model, name) for name in names}, columns

    def _estimator(self, xgboost: Any, path: str, context: Context) -> Any:
        spec = context.spec
        for kind in (xgboost.XGBRegressor, xgboost.XGBClassifier, xgboost.XGBRanker):
            estimator = kind(n_jobs=default_threads(spec))
            try:
                estimator.load_model(path)
            except TypeError:  # saved by an estimator of another kind
                continue
            except (ValueError, xgboost.core.XGBoostError) as ex:
                raise _unreadable(context, "XGBoost") from ex
            return estimator
        raise _unreadable(context, "XGBoost")


class LightgbmBackend(MatrixBackend):
    """Runs a model of `Booster.save_model`."""

    def open_model(self, path: str, context: Context) -> tuple[Methods, int | None]:
        lightgbm = import_extra("lightgbm", "lightgbm", "lightgbm")
        try:
            booster = lightgbm.Booster(model_file=path)
        except lightgbm.basic.LightGBMError as ex:
            raise _unreadable(context, "LightGBM") from ex
        threads = default_threads(context.spec)
        return {"predict": partial(booster.predict, num_threads=threads)}, booster.num_feature()


def _unreadable(context: Context, library: str) -> ConfigError:
    spec = context.spec
    return ConfigError(
        f"model '{spec.name}': file '{spec.config.model_file}' is not a model that this version of"
        f" {library} can read"
    )
