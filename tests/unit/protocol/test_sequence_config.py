"""`sequence_batching` of config.pbtxt: valid settings, and contradictions."""

import pytest

from shmserve.core.scheduling.sequence_policy import SequencePolicy, sequence_policy
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.model_config import parse, parse_json

BASE = """
backend: "python" max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
sequence_batching { %s }
"""
STATE = "state [ { input_name: 'S' output_name: 'T' data_type: TYPE_INT32 dims: [ -1, 2 ] %s } ]"


def policy(text: str) -> SequencePolicy:
    found = sequence_policy(parse(BASE % text, "m").document, 9)
    assert found is not None
    return found


def test_without_it_there_are_no_sequences() -> None:
    plain = parse(BASE.replace("sequence_batching { %s }", ""), "m")
    assert sequence_policy(plain.document, 9) is None


def test_direct_has_a_slot_for_each_row() -> None:
    assert policy("") == SequencePolicy(8, 8, idle_ns=1_000_000_000, max_waiting=9)
    assert policy(
        "direct { max_queue_delay_microseconds: 3 minimum_slot_utilization: 0.3 } "
        "max_sequence_idle_microseconds: 5"
    ) == SequencePolicy(8, 8, enough=3, max_delay_ns=3000, idle_ns=5000, max_waiting=9)


def test_oldest_has_as_many_as_it_says() -> None:
    assert policy("oldest { max_candidate_sequences: 5 }") == SequencePolicy(
        5, 8, False, frozenset((8,)), max_waiting=9
    )
    assert policy(
        "oldest { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 7 }"
    ) == SequencePolicy(1, 8, False, frozenset((2, 4)), max_delay_ns=7000, max_waiting=9)


def test_the_idle_time_that_holds_is_shown() -> None:
    config = parse(BASE % (STATE % ""), "m")
    assert config.document.as_dict()["sequence_batching"]["max_sequence_idle_microseconds"] == 10**6
    assert parse_json(config.document.json().decode(), "m") == config


def test_hints_are_told() -> None:
    hints = "use_same_buffer_for_input_output: true use_growable_memory: true"
    assert parse(BASE % (STATE % hints), "m").notes == (
        "sequence_batching.state.use_same_buffer_for_input_output: no effect "
        "(a state is copied once)",
        "sequence_batching.state.use_growable_memory: no effect "
        "(each state has memory of its own size)",
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences -1"),
        ("oldest { preferred_batch_size: [ 9 ] }", "preferred_batch_size 9 is not between"),
        ("direct { minimum_slot_utilization: 1.5 }", "minimum_slot_utilization 1.5"),
        ("control_input [ { control [ { } ] } ]", "has no name"),
        ("control_input [ { name: 'C' } ]", "'C' has 0 controls"),
        ("control_input [ { name: 'C' control [ { } ] } ]", "needs one of int32_false_true"),
        (
            "control_input [ { name: 'C' control [ { int32_false_true: [ 0 ] } ] } ]",
            "CONTROL_SEQUENCE_START needs one of .* with two values",
        ),
        (
            "control_input [ { name: 'C' control [ { kind: CONTROL_SEQUENCE_CORRID "
            "data_type: TYPE_FP32 } ] } ]",
            "CONTROL_SEQUENCE_CORRID needs one of the data types",
        ),
        (
            "control_input [ { name: 'C' control [ { bool_false_true: [ false, true ] } ] }, "
            "{ name: 'D' control [ { bool_false_true: [ false, true ] } ] } ]",
            "kind 'CONTROL_SEQUENCE_START' is given twice",
        ),
        (
            "control_input [ { name: 'S' control [ { bool_false_true: [ false, true ] } ] } ]"
            + STATE % "",
            "input 'S' is given twice",
        ),
        ("state [ { input_name: 'S' data_type: TYPE_INT32 } ]", "output_name are needed"),
        (STATE.replace("TYPE_INT32", "TYPE_INVALID") % "", "data_type is missing"),
        (STATE.replace("-1, 2", "0") % "", "a size that is not -1 or positive"),
        (STATE % "initial_state [ { }, { } ]", "initial_state is given 2 times"),
        (
            STATE % "initial_state [ { data_type: TYPE_FP32 dims: [ 1, 2 ] zero_data: true } ]",
            "another data_type",
        ),
        (
            STATE % "initial_state [ { data_type: TYPE_INT32 dims: [ 1, 3 ] zero_data: true } ]",
            r"dims \[1, 3\], which do not fit the state's \[-1, 2\]",
        ),
        (
            STATE % "initial_state [ { data_type: TYPE_INT32 dims: [ 1, 2 ] data_file: '../x' } ]",
            "'../x' is not a file inside",
        ),
        (
            STATE % "initial_state [ { data_type: TYPE_INT32 dims: [ 1, 2 ] } ]",
            "needs zero_data or data_file",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse(BASE % text, "m")
