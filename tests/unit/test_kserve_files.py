"""deploy/kserve/: all fields are fields of KServe and Kubernetes, all settings are this
server's."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shmserve import config, model_places, repository, single_models
from tests import kserve_facts
from tests.needs import KSERVE_PYTHON

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/kserve").glob("*.yaml"))
FACTS = json.loads(kserve_facts.FACTS.read_text())
PLAIN = {"str": str, "int": int, "bool": bool, "float": float}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def documents(kind: str = "") -> list[Any]:
    found = [d for path in FILES for d in yaml.safe_load_all(path.read_text())]
    return [d for d in found if not kind or d["kind"] == kind]


def faults(value: Any, kind: str, where: str = "") -> Iterator[str]:
    """Yield the parts of a value that contradict the kind."""
    outer, _, inner = kind.rpartition(":")
    if outer == "list" and isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(item, inner, f"{where}[{number}]")
    elif outer == "dict" and isinstance(value, dict):
        for name, item in value.items():
            yield from faults(item, inner, f"{where}.{name}")
    elif outer or (kind in PLAIN and not isinstance(value, PLAIN[kind])):
        yield f"{where} is no {kind}"
    elif kind in FACTS:
        if not isinstance(value, dict):
            yield f"{where} is no {kind}"
            return
        fields = FACTS[kind]["fields"]
        yield from (
            f"{where} lacks {name}" for name in FACTS[kind]["required"] if name not in value
        )
        for name, item in value.items():
            if name in fields:
                yield from faults(item, fields[name], f"{where}.{name}")
            else:
                yield f"{where}.{name} is no field of {kind}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_field_exists_and_has_its_type(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert list(faults(document, kserve_facts.ROOTS[document["kind"]])) == []


def test_a_wrong_field_is_found() -> None:
    (document, *_) = documents("ClusterServingRuntime")
    container = document["spec"]["containers"][0]
    container["volumeMounts"][0]["path"] = container["volumeMounts"][0].pop("mountPath")
    container["readinessProbe"]["periodSeconds"] = "5"
    document["spec"]["enableServiceLinks"] = False
    assert set(faults(document, "V1alpha1ClusterServingRuntime")) == {
        ".spec.containers[0].volumeMounts[0] lacks mountPath",
        ".spec.containers[0].volumeMounts[0].path is no field of V1VolumeMount",
        ".spec.containers[0].readinessProbe.periodSeconds is no int",
        ".spec.enableServiceLinks is no field of V1alpha1ServingRuntimeSpec",
    }


def pods() -> Iterator[tuple[str, Any, Any]]:
    """Name, the container of the server, and all of the pod."""
    for document in documents():
        spec = document["spec"].get("predictor", document["spec"])
        for container in spec.get("containers", ()):
            if container["name"] == "kserve-container":
                yield document["metadata"]["name"], container, spec


def settings_of(container: Any, **other: str) -> config.Settings:
    environ = {e["name"]: e["value"].replace("{{.Name}}", "digits") for e in container["env"]}
    return config.load({name: other.get(name, value) for name, value in environ.items()})


@pytest.mark.parametrize(
    ("name", "container", "spec"), list(pods()), ids=[name for name, _, _ in pods()]
)
def test_the_parts_fit_each_other(name: str, container: Any, spec: Any) -> None:
    settings = settings_of(container)
    port = int(settings.http_bind[0].rpartition(":")[2])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port
    if "annotations" in spec:
        assert spec["annotations"]["prometheus.kserve.io/port"] == str(port)
    assert settings.grpc_bind == ("0.0.0.0:9000",)
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["medium"] == "Memory"
    assert settings.run_dir.startswith("/run/shmserve/")
    limits = container["resources"]["limits"]
    assert nbytes(mounts["/dev/shm"]["sizeLimit"]) < nbytes(limits["memory"])


def nbytes(text: str) -> int:
    number, unit = re.fullmatch(r"([0-9]+)([A-Za-z]+)", text).groups()
    return int(number) * UNITS[unit]


def test_services_use_runtimes_that_are_there() -> None:
    formats = {
        runtime["metadata"]["name"]: {f["name"] for f in runtime["spec"]["supportedModelFormats"]}
        for runtime in documents("ClusterServingRuntime")
    }
    versions = {
        runtime["metadata"]["name"]: runtime["spec"]["protocolVersions"]
        for runtime in documents("ClusterServingRuntime")
    }
    services = {
        d["metadata"]["name"]: d["spec"]["predictor"] for d in documents("InferenceService")
    }
    for predictor in services.values():
        assert predictor["enableServiceLinks"] is False
        assert predictor["terminationGracePeriodSeconds"] > config.Settings().drain_timeout_s
        if model := predictor.get("model"):
            assert model["modelFormat"]["name"] in formats[model["runtime"]]
            assert model["protocolVersion"] in versions[model["runtime"]]
            config.load({e["name"]: e["value"] for e in model.get("env", ())})
    for trained in documents("TrainedModel"):
        (_, predictor) = next(
            item for item in services.items() if item[0] == trained["spec"]["inferenceService"]
        )
        assert "storageUri" not in predictor["model"]
        framework = trained["spec"]["model"]["framework"]
        assert framework in formats[predictor["model"]["runtime"]]


def test_what_is_mounted_is_served_under_the_service_s_name(tmp_path) -> None:
    """One model's files, as left by the storage initializer."""
    (_, container, _), *_ = pods()
    mounted = tmp_path / "models"
    mounted.mkdir()
    for file in ("config.pbtxt", "labels.txt"):
        shutil.copy(ROOT / "workers/digits" / file, mounted)
    shutil.copytree(ROOT / "workers/digits/1", mounted / "1")
    settings = settings_of(
        container,
        SHMSERVE_MODEL_REPOSITORY=f"digits={mounted}",
        SHMSERVE_RUN_DIR=str(tmp_path / "run"),
    )
    single_models.lay_out(settings)
    found = repository.scan(model_places.repository_paths(settings))
    assert found.failures == {}
    assert list(found.models) == ["digits"]


@pytest.mark.needs("kserve")
def test_the_facts_are_those_of_the_packages() -> None:
    (site,) = KSERVE_PYTHON.parents[1].glob("lib/python3*/site-packages")
    assert kserve_facts.gather(site) == FACTS
