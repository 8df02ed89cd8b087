"""Names of models as GRPS clients write the names."""

from typing import Any

import msgspec

from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.grps.protocol.names import Names
from tests.unit.grps import models_of_grps as models


def entry(name: str, version: str, **parameters: Any) -> ModelEntry:
    spec = models.spec(name, **parameters)
    return ModelEntry(msgspec.structs.replace(spec, version=version), ModelState.READY)


def names(*entries: ModelEntry) -> Names:
    found: dict[str, dict[str, ModelEntry]] = {}
    for one in entries:
        found.setdefault(one.spec.name, {})[one.spec.version] = one
    return Names(Snapshot("e", 1, found))


def test_numbers_are_versions() -> None:
    known = names(entry("m", "3"))
    assert known.find("m-3") == known.find("m-3.0.0") == ("m", "3")
    for other in ("m", "m-", "m-4", "m-03", "m-3.0", "-3", "3", ""):
        assert known.find(other) is None


def test_names_and_versions_may_have_hyphens() -> None:
    known = names(entry("a-b", "1", grps_version="1.0-rc-1"), entry("a", "1"))
    assert known.find("a-b-1.0-rc-1") == ("a-b", "1")
    assert known.find("a-1") == ("a", "1")


def test_a_given_version_is_that_of_the_newest() -> None:
    known = names(entry("m", "1", grps_version="2.5"), entry("m", "10", grps_version="2.5"))
    assert known.find("m-2.5") == ("m", "10")
    assert known.find("m-1.0.0") == ("m", "1")


def test_what_is_given_comes_before_what_is_implied() -> None:
    known = names(entry("m", "1"), entry("m", "2", grps_version="1.0.0"))
    assert known.find("m-1.0.0") == ("m", "2")
    assert known.find("m-1") == ("m", "1")


def test_a_project_is_known_by_its_models() -> None:
    project = {"grps": "message", "grps_inference_yml": "x", "grps_version": "1.1"}
    known = names(
        entry("p", "1", grps_models="net-1.0,head-2.0", **project),
        entry("p", "2", grps_models="net-1.1", **{**project, "grps_version": "1.2"}),
    )
    assert known.find("head-2.0") == known.find("net-1.0") == known.find("p-1.1") == ("p", "1")
    assert known.find("net-1.1") == known.find("p-1.2") == ("p", "2")


def test_a_path_is_the_first_models_that_wants_it() -> None:
    wants = {"grps": "message", "grps_http_path": "/x"}
    known = names(entry("b", "1", **wants), entry("a", "1", **wants))
    assert known.paths["/x"].spec.name == "a"
    assert not known.takes_http
