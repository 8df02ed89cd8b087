"""The table of datatypes agrees with numpy, with the protocol's schema and with Triton's."""

import pytest

from shmserve._generated import grpc_service_pb2, model_config_pb2
from shmserve.grps.frontend.payloads import DTYPES
from shmserve.tensor.datatype_table import ROWS
from shmserve.tensor.dtypes import DATATYPES, Datatype, from_numpy

CONTENTS = grpc_service_pb2.InferTensorContents.DESCRIPTOR.fields_by_number
ALL = [pytest.param(kind, id=kind.name) for kind in DATATYPES.values()]


@pytest.mark.parametrize("kind", ALL)
def test_facts_agree_with_numpy(kind: Datatype) -> None:
    assert from_numpy(kind.numpy) is kind
    assert kind.itemsize == (0 if kind.name == "BYTES" else kind.numpy.itemsize)
    assert kind.extension is (kind.numpy.kind == "V")


@pytest.mark.parametrize("kind", ALL)
def test_facts_agree_with_the_schemas(kind: Datatype) -> None:
    assert kind.config_name in set(model_config_pb2.DataType.keys())
    if not kind.contents_field:
        assert not kind.json_ok, "what has neither goes in binary form only"
        return
    name = CONTENTS[kind.contents_field].name.removesuffix("_contents")
    family = "uint" if kind.name.startswith("UINT") else kind.name.rstrip("0123456789").lower()
    assert name.startswith(family) or (family, name) == ("fp", "fp32")


def test_every_datatype_has_a_way_through_grps() -> None:
    assert DTYPES.keys() == {row.name for row in ROWS}
    assert [name for name, kind in DATATYPES.items() if kind.classifiable] == [
        *("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
        *("FP32", "FP64"),
    ]
