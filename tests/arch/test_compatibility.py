"""Each deviation in docs/compatibility.md has tests of this server's behaviour."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# First cell of a row -> tests, as file and names, below tests/
TESTS: dict[str, tuple[str, ...]] = {
    # Errors
    "malformed JSON, wrong type of a field, negative dimension, wrong number of elements, a"
    " region's key that does not exist, output larger than its window": (
        "conformance/test_http_cases.py::test_case",
        "unit/protocol/test_oip_request.py::test_wrong_fields_of_a_request",
        "integration/test_region_attacks.py::test_what_is_no_memory_object",
        "integration/test_region_attacks.py::test_windows_around_the_region",
    ),
    "more than a setting allows: JSON, tensor, request, files of a load": (
        "unit/frontends/http/test_settings_routes.py::test_a_body_that_is_too_large_is_told_the_limit",
        "unit/frontends/http/test_request_bodies.py::test_decompression_bombs_meet_the_limits",
        "unit/protocol/test_validation.py::test_a_tensor_may_be_too_large",
        "unit/frontends/test_repository_extension.py::test_overrides_are_checked",
        "unit/frontends/http/test_worker_bodies.py::test_chunked_limits",
    ),
    "Content-Encoding other than gzip and deflate": (
        "unit/frontends/http/test_request_bodies.py::test_bad_encodings",
    ),
    "load of an unknown model": (
        "integration/test_model_control.py::test_loading_an_unknown_model_is_a_404",
    ),
    "other requests for an unknown model": (
        "unit/frontends/http/test_app.py::test_unknown_models_and_decoupled_ones",
        "unit/frontends/http/test_settings_routes.py::test_what_is_not_ready_has_no_statistics",
        "unit/frontends/grpc/test_metadata_rpcs.py::test_model_ready",
    ),
    "readiness of the server or a model that is not ready": (
        "unit/frontends/http/test_app.py::test_a_model_that_is_not_ready",
    ),
    "`generate` with no or several answers": (
        "unit/frontends/http/test_generate_routes.py::test_generate_wants_exactly_one_answer",
    ),
    "a model's errors UNKNOWN and CANCELLED": (
        "unit/frontends/http/test_app.py::test_a_models_code_has_its_status",
    ),
    "no answer in time": (
        "integration/test_statistics.py::test_deadlines_and_full_queues_are_failures_of_their_own",
    ),
    "the model's process died": (
        "integration/test_misbehaving.py::test_os_exit_costs_its_request_only",
    ),
    "registering another user's object, or from another host; files of a load by others than the"
    " server's user": (
        "integration/test_region_attacks.py::test_another_user_finds_nothing_of_ours",
        "integration/test_region_attacks.py::test_remote_callers_register_nothing_unless_allowed",
        "integration/test_access.py::test_another_user_of_the_host",
    ),
    "too large integers; data for an empty shape or after compressed data; a NUL in a key; raw data"
    " and a region for one input; one `raw_input_contents` too many; typed contents that do not"
    " fit": (
        "conformance/test_http_cases.py::test_case",
        "unit/frontends/http/test_request_bodies.py::test_bad_encodings",
        "unit/frontends/http/test_request_bodies.py::test_sizes_that_disagree",
        "unit/protocol/test_infer_wire.py::test_data_in_no_way_or_in_two_is_refused",
        "unit/protocol/test_infer_contents.py::test_an_integer_that_does_not_fit_is_refused",
        "unit/protocol/test_infer_contents.py::test_contents_that_do_not_fit_the_input_are_refused",
        "integration/test_region_attacks.py::test_keys",
    ),
    "Content-Length with Transfer-Encoding": (
        "integration/test_http_worker.py::test_refusals_are_json_and_end_the_connection",
    ),
    "unknown trace settings": (
        "unit/frontends/test_log_and_trace.py"
        "::test_what_cannot_be_traced_is_refused_by_name_and_changes_nothing",
    ),
    # Requests and answers
    "several codings offered without weights": (
        "unit/frontends/http/test_request_bodies.py::test_accept_encoding",
    ),
    "`Content-Encoding: GZIP` and `x-gzip`; OPTIONS; a region at an offset that is no multiple of a"
    " page": (
        "unit/frontends/http/test_request_bodies.py::test_compressed_requests",
        "unit/frontends/http/test_app.py::test_options_tells_the_methods",
        "integration/test_regions.py::test_windows_and_offsets_need_not_be_aligned",
    ),
    "classification of over 1,000,000 elements": (
        "unit/protocol/test_validation.py::test_many_elements_are_classified",
    ),
    "requests of one gRPC stream that run, or whose answers wait for earlier ones": (
        "unit/frontends/grpc/test_stream_side_by_side.py"
        "::test_another_request_begins_once_one_is_answered",
        "unit/frontends/grpc/test_stream_side_by_side.py"
        "::test_a_client_that_does_not_read_leaves_answers_in_their_places",
    ),
    "unread answers of decoupled models": (
        "integration/test_streams.py::test_a_reader_that_stops_reading_holds_back_the_model",
    ),
    "client shared memory": (
        "unit/frontends/test_shared_memory.py::test_users_have_regions_of_their_own",
        "integration/test_regions.py::test_tritonclient_with_its_own_shared_memory",
    ),
    "unregistering a region in use": (
        "integration/test_region_attacks.py::test_unregistered_during_a_request",
    ),
    "ONNX models on a CPU": (
        "unit/protocol/test_instance_groups.py"
        "::test_there_is_one_instance_if_nothing_says_otherwise",
        "unit/executor/test_onnx_backend.py::test_an_instance_has_its_share_of_the_cores",
    ),
    "the response cache": (
        "unit/dispatch/test_response_cache.py::test_an_answer_is_given_again_without_its_executor",
    ),
    # Sequences and ensembles
    "a request of an iterative sequence with the id of a running one": (
        "unit/executor/test_iterative_sequences.py::test_deadline_and_bounds",
    ),
    "cancelling a waiting request of a sequence": (
        "unit/core/test_sequence_queue.py::test_a_request_that_is_cancelled_was_a_sign_of_life",
        "unit/core/test_sequence_queue.py::test_without_its_beginning_there_is_no_sequence",
    ),
    "a sequence's id": (
        "unit/core/test_sequence_names.py"
        "::test_owners_are_keys_then_users_then_all_remote_callers_together",
        "integration/test_sequence_owners.py::test_shared_sequences_are_everybodys",
    ),
    "all slots are taken by one caller's idle sequences": (
        "unit/executor/test_sequence_owners.py"
        "::test_an_idle_sequence_gives_way_to_a_caller_without_one",
    ),
    "two owners use one id at a time": (
        "unit/executor/test_sequence_owners.py::test_the_model_tells_equal_ids_apart",
        "integration/test_sequence_owners.py::test_equal_ids_of_several_owners_do_not_meet",
    ),
    "the model works longer than `max_sequence_idle_microseconds`": (
        "unit/core/test_sequence_queue.py"
        "::test_a_request_in_the_model_or_waiting_keeps_its_sequence",
    ),
    "an ensemble joins tensors of two decoupled steps": (
        "unit/core/test_ensemble_graph.py::test_tensors_of_two_decoupled_steps_do_not_meet",
    ),
    "answers behind a decoupled step": (
        "unit/dispatch/test_ensembles.py::test_a_stream_behind_a_stream_keeps_its_order",
    ),
    "`sequence_id`, `sequence_start`, `sequence_end` in a step's answer": (
        "unit/dispatch/test_ensembles.py"
        "::test_what_an_answer_says_of_sequences_is_not_said_to_the_next_step",
    ),
    "a tensor beside a decoupled step's answers": (
        "unit/dispatch/test_ensembles.py::test_steps_behind_one_that_streams",
    ),
    # Python models
    "inputs": (
        "unit/executor/test_triton_dialect.py::test_triton_nonsense",
        "unit/executor/test_triton_dialect.py::test_writable_inputs_are_copies",
    ),
    "errors": ("unit/executor/test_triton_dialect.py::test_triton_errors",),
    "decoupled with `dynamic_batching`": (
        "unit/executor/test_batch_loop.py::test_a_decoupled_model_gets_one_request_at_a_time",
    ),
    "a request dropped without an answer": (
        "unit/executor/test_response_senders.py::test_streams_that_do_not_end_well",
        "unit/executor/test_response_senders.py::test_ordinary_models_that_send_nothing",
    ),
    "calls to other models in `initialize` and `finalize`": (
        "unit/executor/test_calling_models.py::test_calls_are_made_in_initialize_and_finalize",
    ),
    "responses of a decoupled call": (
        "unit/executor/test_calling_models.py::test_the_responses_of_a_call_can_be_read_once",
    ),
    "a decoupled call is cancelled, and the called model goes on": (
        "unit/executor/test_model_calls.py::test_cancelling_leaves_the_answers_that_have_come",
        "unit/executor/test_model_calls.py::test_a_cancelled_stream_ends_though_its_model_goes_on",
    ),
    "`is_model_ready()` of the model": (
        "unit/executor/test_triton_dialect.py::test_a_models_own_readiness_is_not_asked",
    ),
    "`EXECUTION_ENV_PATH`": (
        "integration/test_environments.py::test_models_whose_packages_contradict_each_other",
        "unit/executor/test_environments.py::test_what_an_environment_lacks_is_said",
    ),
    "`EXECUTION_ENV_PATH` that is relative": (
        "unit/executor/test_environments.py::test_the_environment_that_a_configuration_names",
    ),
    "`backend` naming a folder with a `model.py` for several models": (
        "unit/protocol/test_model_config.py::test_backend_by_name_platform_or_files",
    ),
    "`preferred_memory` and `trace` of a call": (
        "unit/executor/test_calling_models.py::test_a_triton_model_calls_another",
    ),
    "`shared_memory` of `c_python_backend_utils`": (
        "unit/executor/test_pb_utils_names.py::test_both_of_tritons_modules_are_there",
    ),
    "metrics of one name and labels in several instances": (
        "integration/test_python_models.py"
        "::test_metrics_of_models_come_and_go_with_their_instances",
    ),
    # Statistics and traces
    "statistics of a model loaded again": (
        "integration/test_statistics.py::test_a_model_that_is_loaded_again_goes_on_counting",
    ),
    "`opentelemetry`: a `traceparent` that is not sampled": (
        "unit/dispatch/test_traces.py::test_a_trace_is_spans_within_what_its_client_has_begun",
    ),
    "`opentelemetry`: a model's calls": (
        "integration/test_opentelemetry.py::test_models_within_a_request",
    ),
    "a trace file": (
        "unit/dispatch/test_traces.py::test_files_have_as_many_traces_as_the_frequency_says",
    ),
    "`nv_energy_consumption`": (
        "unit/frontends/http/test_settings_routes.py::test_gpus_are_told_with_what_they_have",
    ),
}


def rows() -> list[str]:
    text = (ROOT / "docs/compatibility.md").read_text().partition("## Deviations on purpose")[2]
    cells = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", text, re.MULTILINE)
    return [cell for cell in cells if cell != "case"]


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_each_deviation_has_tests_and_each_test_a_deviation() -> None:
    assert rows() == list(TESTS), "the same rows in the same order"


@pytest.mark.parametrize("row", TESTS)
def test_the_names_in_a_deviation_exist(row: str) -> None:
    assert TESTS[row]
    for test in TESTS[row]:
        file, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in names_in(file), test
