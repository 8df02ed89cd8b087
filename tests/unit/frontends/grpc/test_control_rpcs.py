"""Repository, statistics, settings over gRPC; secrets; counts of requests."""

from typing import Any

import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.core.caller import Caller
from shmserve.core.registry import ModelState
from shmserve.errors import ConfigError, InvalidArgument
from shmserve.frontends.grpc.call_pools import CallPools, ClientDeadlines
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.handlers import Methods
from shmserve.frontends.grpc.process.server import SERVICE
from shmserve.frontends.oip.restricted_apis import CATEGORIES
from shmserve.frontends.presented_keys import PresentedKeys
from shmserve.grps.frontend.rpcs import SERVICE as GRPS
from shmserve.protocol.control.stats_messages import ModelReport, Report
from tests import fake_models
from tests.grpc_client import Rig, one_caller, request

LOAD = pb.RepositoryModelLoadRequest
UNLOAD = pb.RepositoryModelUnloadRequest


def test_the_index(rig: Rig) -> None:
    rig.dispatcher.put(fake_models.spec("loading", "FP32", (-1,)), ModelState.LOADING)
    rows = rig.client.call("RepositoryIndex").models
    told = {row.name: (row.version, row.state) for row in rows}
    assert told["loading"] == ("1", "LOADING")
    ready = rig.client.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)).models
    assert {row.state for row in ready} == {"READY"}
    named = pb.RepositoryIndexRequest(repository_name="x")
    assert rig.client.error("RepositoryIndex", named)[0] == "UNIMPLEMENTED"


def test_load_and_unload() -> None:
    load = LOAD(model_name="m")
    load.parameters["config"].string_param = "{}"
    load.parameters["file:1/model.py"].bytes_param = b"code"
    unload = UNLOAD(model_name="m")
    unload.parameters["unload_dependents"].bool_param = True
    with Rig(model_control="explicit", model_files_from="anyone") as rig:
        rig.client.call("RepositoryModelLoad", load)
        assert rig.dispatcher.coordinator.loads == [("m", "{}", {"1/model.py": b"code"})]
        rig.client.call("RepositoryModelUnload", unload)
        assert rig.dispatcher.coordinator.unloads == ["m"]
        assert rig.dispatcher.coordinator.unloaded_dependents == [True]
        rig.dispatcher.coordinator.refusal = InvalidArgument("load failed for model 'm'")
        code, details = rig.client.error("RepositoryModelLoad", load)
        assert (code, details) == ("INVALID_ARGUMENT", "load failed for model 'm'")


def test_loads_that_are_refused() -> None:
    empty, text = LOAD(model_name="m"), LOAD(model_name="m")
    empty.parameters["config"].SetInParent()
    text.parameters["file:1/model.py"].string_param = "code"
    unload = UNLOAD(model_name="m")
    unload.parameters["unload_dependents"].string_param = "yes"
    with Rig(model_control="explicit", model_files_from="anyone") as rig:
        error = rig.client.error
        for bad in (LOAD(), LOAD(model_name="../m"), empty, text):
            assert error("RepositoryModelLoad", bad)[0] == "INVALID_ARGUMENT"
        assert error("RepositoryModelUnload", unload)[0] == "INVALID_ARGUMENT"
        # Other protocols have the model's name in this field.
        for name, kind in (("RepositoryModelLoad", LOAD), ("RepositoryModelUnload", UNLOAD)):
            assert error(name, kind(repository_name="m"))[0] == "UNIMPLEMENTED"
        assert rig.dispatcher.coordinator.loads == []
    with Rig() as rig:
        assert rig.client.error("RepositoryModelLoad", LOAD(model_name="m"))[0] == "UNAVAILABLE"


def test_statistics(rig: Rig) -> None:
    rig.dispatcher.coordinator.numbers = Report((ModelReport("identity", "1"),), (), {}, {})
    asked = pb.ModelStatisticsRequest(name="identity", version="1")
    (model,) = rig.client.call("ModelStatistics", asked).model_stats
    assert (model.name, model.version) == ("identity", "1")
    assert model.inference_stats.success.count == 0
    assert len(rig.client.call("ModelStatistics").model_stats) > 1
    for name, version in (("nosuch", ""), ("identity", "2"), ("identity", "abc")):
        bad = pb.ModelStatisticsRequest(name=name, version=version)
        assert rig.client.error("ModelStatistics", bad)[0] == "INVALID_ARGUMENT"
    rig.dispatcher.coordinator.numbers = None
    assert rig.client.error("ModelStatistics")[0] == "UNAVAILABLE"


def test_trace_settings(rig: Rig) -> None:
    update = pb.TraceSettingRequest(model_name="identity")
    update.settings["trace_level"].value.append("TIMESTAMPS")
    update.settings["trace_rate"].value.append("7")
    told = rig.client.call("TraceSetting", update).settings
    assert list(told["trace_level"].value) == ["TIMESTAMPS"]
    assert list(told["trace_rate"].value) == ["7"]
    clear = pb.TraceSettingRequest(model_name="identity")
    clear.settings["trace_rate"].SetInParent()
    told = rig.client.call("TraceSetting", clear).settings
    assert list(told["trace_rate"].value) != ["7"]
    assert list(told["trace_level"].value) == ["TIMESTAMPS"]
    update.settings["nonsense"].value.append("1")
    assert rig.client.error("TraceSetting", update)[0] == "INVALID_ARGUMENT"


def test_log_settings(rig: Rig) -> None:
    update = pb.LogSettingsRequest()
    update.settings["log_info"].bool_param = False
    update.settings["log_verbose_level"].uint32_param = 2
    update.settings["log_format"].string_param = "ISO8601"
    told = rig.client.call("LogSettings", update).settings
    assert told["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert not told["log_info"].bool_param
    assert told["log_error"].bool_param
    assert told["log_verbose_level"].uint32_param == 2
    assert told["log_format"].string_param == "ISO8601"
    assert rig.client.call("LogSettings").settings["log_verbose_level"].uint32_param == 2
    empty = pb.LogSettingsRequest()
    empty.settings["log_info"].SetInParent()
    assert rig.client.error("LogSettings", empty)[0] == "INVALID_ARGUMENT"


def test_protocols_that_need_a_secret() -> None:
    rules = ("inference,health:key=secret", "trace:other=x")
    with Rig(grpc_restricted_protocol=rules) as rig:
        good: Any = (("triton-grpc-protocol-key", "secret"),)
        for metadata in ((), (("triton-grpc-protocol-key", "wrong"),), (("key", "secret"),)):
            code, details = rig.client.error("ModelInfer", request(), metadata=metadata)
            assert code == "UNAVAILABLE"
            assert "This protocol is restricted, expecting header" in details
        assert rig.client.infer(metadata=good).outputs
        assert rig.client.error("ServerLive")[0] == "UNAVAILABLE"
        assert rig.client.error("/grpc.health.v1.Health/Check")[0] == "UNAVAILABLE"
        assert rig.client.call("ServerLive", metadata=good).live
        assert rig.client.error("TraceSetting", metadata=good)[0] == "UNAVAILABLE"
        assert rig.client.call("ServerMetadata").name
        everything = ",".join(CATEGORIES) + ":key=secret"
    with Rig(grpc_restricted_protocol=(everything,)) as rig:
        for service in (SERVICE, GRPS):
            for method in service.methods_by_name:
                if "Stream" not in method:
                    code, details = rig.client.error(f"/{service.full_name}/{method}")
                    assert (code, "expecting header" in details) == ("UNAVAILABLE", True)
    with pytest.raises(ConfigError, match="grpc_restricted_protocol"):
        Rig(grpc_restricted_protocol=("nonsense",))


def test_an_rpc_without_a_category_is_refused_at_start() -> None:
    keys = PresentedKeys(Settings(), print)
    access = CallAccess(Access(Settings(), 1), one_caller(Caller(1)), keys)
    deadlines = ClientDeadlines(lambda when, call: None)
    pool = CallPools(Settings(), deadlines).quick
    methods = Methods(deadlines, Settings(), access, fake_models.dispatcher())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rpc Ping has no category of the restricted APIs"):
        methods.unary("Ping", "admin", lambda data, _: data, pool)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rpc Pings has no category"):
        methods.stream("Pings", "", lambda data, _: data, pool)  # type: ignore[arg-type]


def test_what_is_counted_of_requests(rig: Rig) -> None:
    rig.client.infer()
    assert rig.dispatcher.calls[-1].outcomes == ["answered"]
    rig.client.error("ModelInfer", request(model="decoupled"))
    bad = request()
    bad.inputs[0].shape[:] = [3]
    rig.client.error("ModelInfer", bad)
    invalid = ("identity", "InvalidArgument")
    assert rig.dispatcher.refusals == [("decoupled", "Unimplemented"), invalid]
    rig.dispatcher.budget = 1
    rig.client.error("ModelInfer", request())
    assert rig.dispatcher.calls[-1].outcomes == ["ArenaExhausted"]
    rig.dispatcher.budget = None
    list(rig.client.stream([request(), bad]))
    assert rig.dispatcher.calls[-1].outcomes == ["answered"]
    assert rig.dispatcher.refusals[2:] == [invalid]
