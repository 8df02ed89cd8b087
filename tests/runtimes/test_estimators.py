"""Models of scikit-learn, XGBoost and LightGBM, compared with the library's own answers."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ConfigError
from shmserve.tensor.dtypes import from_numpy
from tests.backend_runner import arrays, ask, failure, load
from tests.servers import Server

RANDOM = np.random.default_rng(0)
X = RANDOM.random((60, 4)).astype(np.float32)
CLASSES = np.where(X[:, 0] > 0.5, np.where(X[:, 1] > 0.5, 2, 1), 0)
Y = X @ np.array([1, 2, 3, 4], np.float32)
Save = Callable[[Path], Any]


def joblib_of(model: Any) -> Save:
    import joblib

    return lambda path: joblib.dump(model, path)


def bytes_of(data: bytes) -> Save:
    return lambda path: path.write_bytes(data)


def sklearn_classifier(names: bool = False) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(X, np.array(["no", "so", "yes"])[CLASSES] if names else CLASSES)


def sklearn_regressor() -> Any:
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(5, random_state=0).fit(X, Y)


def xgboost_model(kind: str, y: Any) -> Any:
    import xgboost

    return getattr(xgboost, kind)(n_estimators=5, max_depth=3).fit(X, y)


def lightgbm_booster(**parameters: Any) -> Any:
    import lightgbm

    quiet = {"verbosity": -1, "min_data_in_leaf": 2, **parameters}
    return lightgbm.train(quiet, lightgbm.Dataset(X, CLASSES), 5)


def folder(root: Path, file: str, save: Save, config: str = "", name: str = "m") -> str:
    (root / name / "1").mkdir(parents=True)
    save(root / name / "1" / file)
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return str(root / name)


def described(spec: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(t.name, t.datatype, t.shape) for t in (*spec.inputs, *spec.outputs)]


def asked(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body) if body is not None else None
    status, _, answer = server.request(method, f"/v2/{path}", data)
    return status, json.loads(answer or b"{}")


def column(array: Any) -> Any:
    return np.asarray(array).reshape(len(X), -1)


@pytest.mark.needs("sklearn")
def test_a_classifier_without_a_configuration(tmp_path: Path) -> None:
    model = sklearn_classifier()
    directory = folder(tmp_path, "model.joblib", joblib_of(model))
    backend, spec = load(directory, allow_model_code=True)
    assert (spec.backend, spec.max_batch_size) == ("sklearn", 0)
    assert described(spec) == [
        ("predict", "FP32", (-1, 4)),
        ("predict", "INT64", (-1, 1)),
        ("predict_proba", from_numpy(model.predict_proba(X).dtype).name, (-1, 3)),
    ]
    got = arrays(ask(backend, spec, predict=X))
    np.testing.assert_array_equal(got["predict"], column(model.predict(X)))
    np.testing.assert_allclose(got["predict_proba"], model.predict_proba(X))


@pytest.mark.needs("sklearn")
def test_classes_with_names_are_strings(tmp_path: Path) -> None:
    model = sklearn_classifier(names=True)
    directory = folder(tmp_path, "model.joblib", joblib_of(model))
    backend, spec = load(directory, allow_model_code=True)
    assert spec.output("predict").datatype == "BYTES"
    got = arrays(ask(backend, spec, ("predict",), predict=X))["predict"]
    assert got.ravel().tolist() == model.predict(X).tolist()


@pytest.mark.needs("sklearn")
def test_a_pipeline_with_a_configuration(tmp_path: Path) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), sklearn_regressor()).fit(X, Y)
    config = """backend: "sklearn" max_batch_size: 64
        input [ { name: "x" data_type: TYPE_FP64 } ]"""
    save = bytes_of(pickle.dumps(model))
    directory = folder(tmp_path, "model.pkl", save, config)
    backend, spec = load(directory, allow_model_code=True)
    assert described(spec) == [("x", "FP64", (-1, 4)), ("predict", "FP64", (-1, 1))]
    assert "max_queue_delay" in str(spec.config.dynamic_batching), "batched as the file says"
    x = X.astype(np.float64)
    got = arrays(ask(backend, spec, x=x))["predict"]
    np.testing.assert_allclose(got, column(model.predict(x)))


@pytest.mark.needs("sklearn")
def test_a_pipeline_of_texts_needs_its_tensors_in_the_configuration(tmp_path: Path) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    texts = ["good fine", "bad awful", "fine", "awful"]
    model = make_pipeline(CountVectorizer(), MultinomialNB()).fit(texts, [1, 0, 1, 0])
    directory = folder(tmp_path, "model.joblib", joblib_of(model))
    with pytest.raises(ConfigError, match=r"input: dims is missing.*number of columns"):
        load(directory, allow_model_code=True)
    config = 'backend: "sklearn" input [ { name: "text" data_type: TYPE_STRING dims: [ -1 ] } ]'
    (tmp_path / "m/config.pbtxt").write_text(config)
    backend, spec = load(directory, allow_model_code=True)
    asked = np.array([b"fine", b"bad"], object)
    assert arrays(ask(backend, spec, ("predict",), text=asked))["predict"].tolist() == [[1], [0]]
    wrong = failure(ask(backend, spec, text=np.array([b"\xff"], object)))
    assert (wrong.code, "not UTF-8" in wrong.message) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.needs("sklearn")
def test_a_pickle_needs_permission_and_is_not_opened_without(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    for file in ("model.joblib", "model.pkl", "model.pickle"):
        data = pickle.dumps(Evil())
        directory = folder(tmp_path, file, bytes_of(data), name=file)
        with pytest.raises(
            ConfigError, match=rf"'{file}' is a pickle: the setting allow_model_code"
        ):
            load(directory)
    assert not ran.exists()


@pytest.mark.needs("sklearn")
def test_values_that_a_model_refuses_are_the_callers_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = folder(tmp_path, "model.joblib", joblib_of(sklearn_classifier()))
    backend, spec = load(directory, allow_model_code=True)
    error = failure(ask(backend, spec, predict=np.full((1, 4), np.nan, np.float32)))
    assert (error.code, "NaN" in error.message) == (Code.INVALID_ARGUMENT, True)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().startswith("inference failed: ValueError: Input X contains NaN")


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("input [ { name: 'x' dims: [ -1, 5 ] } ]", r"'x' has shape \[-1, 5\], but \[-1, 4\]"),
        ("input [ { name: 'x' }, { name: 'y' } ]", "takes one input, the configuration has 2"),
        ("output [ { name: 'score' } ]", "output 'score' is not in the model"),
        (
            "output [ { name: 'predict' data_type: TYPE_FP32 } ]",
            "output 'predict' is FP32, but INT64 in the model",
        ),
        ("input [ { name: 'x' data_type: TYPE_STRING } ]", r"a trial with zeros failed .*config"),
    ],
)
def test_a_configuration_that_contradicts_the_model(tmp_path: Path, config: str, text: str) -> None:
    save = joblib_of(sklearn_classifier())
    directory = folder(tmp_path, "model.joblib", save, f"backend: 'sklearn' {config}")
    with pytest.raises(ConfigError, match=text):
        load(directory, allow_model_code=True)


@pytest.mark.needs("sklearn")
def test_an_object_that_cannot_predict(tmp_path: Path) -> None:
    directory = folder(tmp_path, "model.joblib", joblib_of({"weights": X}))
    with pytest.raises(ConfigError, match="holds a dict, which cannot predict"):
        load(directory, allow_model_code=True)


@pytest.mark.needs("xgboost")
@pytest.mark.parametrize("file", ["model.json", "model.ubj"])
def test_xgboost_needs_no_permission(tmp_path: Path, file: str) -> None:
    model = xgboost_model("XGBClassifier", CLASSES)
    backend, spec = load(folder(tmp_path, file, model.save_model))
    assert spec.backend == "xgboost"
    assert [name for name, _, _ in described(spec)] == ["predict", "predict", "predict_proba"]
    got = arrays(ask(backend, spec, predict=X))
    np.testing.assert_array_equal(got["predict"], column(model.predict(X)))
    np.testing.assert_allclose(got["predict_proba"], model.predict_proba(X))


@pytest.mark.needs("xgboost")
def test_an_input_without_rows_is_the_callers_mistake(tmp_path: Path) -> None:
    model = xgboost_model("XGBClassifier", CLASSES)
    backend, spec = load(folder(tmp_path, "model.json", model.save_model))
    error = failure(ask(backend, spec, predict=X[:0]))
    assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "the input has no rows")


@pytest.mark.needs("xgboost")
def test_a_regressor_and_a_booster_of_xgboost(tmp_path: Path) -> None:
    model = xgboost_model("XGBRegressor", Y)
    for name, save in (("r", model.save_model), ("b", model.get_booster().save_model)):
        backend, spec = load(folder(tmp_path, "model.json", save, name=name))
        assert described(spec) == [("predict", "FP32", (-1, 4)), ("predict", "FP32", (-1, 1))]
        got = arrays(ask(backend, spec, predict=X))["predict"]
        np.testing.assert_allclose(got, column(model.predict(X)), rtol=1e-6)


@pytest.mark.needs("lightgbm")
@pytest.mark.parametrize("file", ["model.txt", "model.bst"])
def test_lightgbm_needs_no_permission(tmp_path: Path, file: str) -> None:
    model = lightgbm_booster(objective="multiclass", num_class=3)
    backend, spec = load(folder(tmp_path, file, model.save_model))
    assert spec.backend == "lightgbm"
    assert described(spec) == [("predict", "FP32", (-1, 4)), ("predict", "FP64", (-1, 3))]
    got = arrays(ask(backend, spec, predict=X))["predict"]
    np.testing.assert_allclose(got, model.predict(X))


@pytest.mark.parametrize(
    ("backend", "file", "data"),
    [
        pytest.param("xgboost", "model.json", b"{}", marks=pytest.mark.needs("xgboost")),
        pytest.param("lightgbm", "model.txt", b"tree\n", marks=pytest.mark.needs("lightgbm")),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, backend: str, file: str, data: bytes) -> None:
    directory = folder(tmp_path, file, bytes_of(data))
    assert repository.read_folder(directory).config.backend == backend
    with pytest.raises(ConfigError, match="is not a model that this version of") as caught:
        load(directory)
    assert str(tmp_path) not in caught.value.message


def mlserver_folder(
    root: Path, name: str, runtime: str, file: str, save: Save, **fields: Any
) -> None:
    """Write a folder as MLServer's own examples have it."""
    (root / name).mkdir(parents=True)
    save(root / name / file)
    settings = {"name": name, "implementation": f"mlserver_{runtime}", **fields}
    (root / name / "model-settings.json").write_text(json.dumps(settings))


@pytest.mark.needs("sklearn", "xgboost", "lightgbm")
def test_folders_of_mlservers_are_served_unchanged(tmp_path: Path) -> None:
    sklearn, xgboost = sklearn_classifier(), xgboost_model("XGBClassifier", CLASSES)
    lightgbm = lightgbm_booster(objective="regression")
    saved = joblib_of(sklearn), xgboost.save_model, lightgbm.save_model
    uri = {"uri": "./model.joblib", "version": "v0.1.0"}
    more = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [-1, 4]}], "max_batch_size": 64}
    mlserver_folder(tmp_path, "a", "sklearn.SKLearnModel", "model.joblib", saved[0], parameters=uri)
    mlserver_folder(tmp_path, "b", "xgboost.XGBoostModel", "model.json", saved[1], **more)
    uri = {"uri": "./iris.bst", "version": "3"}
    mlserver_folder(tmp_path, "c", "lightgbm.LightGBMModel", "iris.bst", saved[2], parameters=uri)
    with Server(tmp_path, http_workers=1, allow_model_code=True) as server:
        for name, model, input_name, datatype, version, rows in (
            ("a", sklearn, "predict", "FP32", "1", 0),
            ("b", xgboost, "x", "FP64", "1", 64),
            ("c", lightgbm, "predict", "FP32", "3", 0),
        ):
            tensor: dict[str, Any] = {"name": input_name, "datatype": datatype, "shape": [60, 4]}
            tensor["data"] = X.ravel().tolist()
            body = {"inputs": [tensor], "outputs": [{"name": "predict"}]}
            status, answer = asked(server, "POST", f"models/{name}/infer", body)
            assert (status, answer["model_version"]) == (200, version)
            (output,) = answer["outputs"]
            assert (output["name"], output["shape"]) == ("predict", [60, 1])
            np.testing.assert_allclose(output["data"], model.predict(X), rtol=1e-6)
            _, config = asked(server, "GET", f"models/{name}/config")
            assert config["max_batch_size"] == rows
            tensor["shape"] = [48, 5]
            status, answer = asked(server, "POST", f"models/{name}/infer", body)
            assert (status, "unexpected shape" in answer["error"]) == (400, True)


@pytest.mark.needs("sklearn")
def test_a_server_without_the_setting_says_what_it_lacks(tmp_path: Path) -> None:
    folder(tmp_path, "model.joblib", joblib_of(sklearn_classifier()))
    with Server(tmp_path, http_workers=1, model_control="explicit") as server:
        status, answer = asked(server, "POST", "repository/models/m/load", {})
        assert (status, "allow_model_code must be true" in answer["error"]) == (400, True)
        given = {"parameters": {"config": json.dumps(
            {"backend": "sklearn", "parameters": {"allow_model_code": {"string_value": "true"}}}
        )}}  # fmt: skip
        status, answer = asked(server, "POST", "repository/models/m/load", given)
        assert (status, "allow_model_code must be true" in answer["error"]) == (400, True)
