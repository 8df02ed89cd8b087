"""Triton's Python dialect in a real service: senders, coroutines, models' own metrics."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.holding import samples
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only, served

MODELS = Path(__file__).parents[1] / "repositories" / "python_models"
PREFIX = "Unable to send response. "
SECOND = f"{PREFIX}Non-decoupled model cannot send more than one response."
EMPTY = f"{PREFIX}Non-decoupled model cannot send complete final before sending a response."
CLOSED = f"{PREFIX}Response sender has been closed."
server = served(MODELS, **only("metered,sender,sender_stream"), **SMALL)


def ask(server: Server, command: str) -> str:
    """Return the answer of the ordinary model; an error's text is in brackets."""
    tensor = {"name": "COMMAND", "shape": [1], "datatype": "BYTES", "data": [command]}
    status, document = server.infer("sender", {"inputs": [tensor]})
    return document["outputs"][0]["data"][0] if status == 200 else f"[{document['error']}]"


def stream(server: Server, command: str) -> list[str]:
    """Return the answers of the decoupled model; errors are in brackets."""
    body = json.dumps({"COMMAND": command}).encode()
    path = "/v2/models/sender_stream/generate_stream"
    status, headers, answer = server.request("POST", path, body)
    if headers["content-type"] == "application/json":
        return [f"[{json.loads(answer)['error']}]"]
    assert status in (200, 500)  # the status of the first answer, which may be an error
    events = [json.loads(e.removeprefix("data: ")) for e in answer.decode().split("\n\n") if e]
    return [e["SAID"] if "SAID" in e else f"[{e['error']}]" for e in events]


@pytest.mark.parametrize(
    ("command", "answer", "refused"),
    [
        ("last:a", "a", ""),
        ("send:a final", "a", ""),
        ("send:a", "a", ""),
        ("send:a send:b final", "a", SECOND),
        ("last:a send:b final", "a", f"{SECOND}|{CLOSED}"),
        ("last:a return:b", "a", ""),
        ("send:a raise:b", "a", ""),
        ("final last:a", "a", EMPTY),
        ("async send:a return:b", "a", ""),
        ("async return:a", "a", ""),
    ],
)
def test_the_first_response_of_an_ordinary_model_is_its_answer(
    server: Server, command: str, answer: str, refused: str
) -> None:
    assert ask(server, command) == answer
    assert ask(server, "told") == refused


def test_an_ordinary_model_that_fails_is_told_in_tritons_words(server: Server) -> None:
    failed = "Failed to process the request(s) for model 'sender_0_0', message:"
    assert ask(server, "raise:x") == ask(server, "async raise:x") == f"[{failed} ValueError: x]"
    assert ask(server, "async") == (
        f"[{failed} Expected a list in the execute return, found type '<class 'NoneType'>'.]"
    )


def test_a_decoupled_model_sends_until_the_final_flag(server: Server) -> None:
    assert stream(server, "send:a send:b last:c send:d final") == ["a", "b", "c"]
    (told,) = stream(server, "told")
    assert told == (
        "[Failed to process the request(s) for model 'sender_stream_0_0', message: Python model "
        "'sender_stream_0_0' is using the decoupled mode and the execute function must return "
        "None.]"
    )
    assert stream(server, "last:a return:b") == ["a"]
    (first, error) = stream(server, "send:a raise:b")
    assert (first, "ValueError: b" in error) == ("a", True)


def test_coroutines_of_a_decoupled_model_wait_for_each_other(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    words = [f"async meet:3 send:{number} final" for number in range(3)]
    answers = list(threads.map(lambda command: stream(server, command), words))
    assert answers == [["0"], ["1"], ["2"]]


# ------------------------------------------------------------------------------ metrics


def metered(server: Server) -> dict[tuple[str, ...], float]:
    """Return the values of the models' own metrics, by name and labels."""
    found = samples(server.request("GET", "/metrics")[2])
    return {key: value for key, value in found.items() if key[0].startswith("metered_")}


def send(server: Server, requests: int) -> None:
    """So many at a time, with X from 0 on."""

    def status(x: int) -> int:
        tensor = {"name": "X", "shape": [1], "datatype": "FP32", "data": [x]}
        return server.infer("metered", {"inputs": [tensor]})[0]

    with ThreadPoolExecutor(requests) as clients:
        assert set(clients.map(status, range(requests))) == {200}


def test_metrics_of_models_come_and_go_with_their_instances(server: Server) -> None:
    of = "of=metered"
    gauges = [("metered_level", f"instance=metered/1/{number}", of) for number in range(2)]
    assert {key: metered(server)[key] for key in gauges} == dict.fromkeys(gauges, 0)
    send(server, 12)
    told = metered(server)
    assert told["metered_requests_total", of] == told["metered_sizes_count", of] == 12
    assert told["metered_sizes_sum", of] == sum(range(12))
    buckets = {le: told["metered_sizes_bucket", f"le={le}", of] for le in ("1", "10", "+Inf")}
    assert buckets == {"1": 2, "10": 11, "+Inf": 12}
    assert all(0 <= told[key] < 12 for key in gauges)

    first, second = server.pids("executor metered")
    os.kill(first, signal.SIGKILL)
    metered(server)  # at once, in whichever process has the counts
    wait_until(
        lambda: (
            len(server.pids("executor metered")) == 2
            and first not in server.pids("executor metered")
        ),
        "another executor",
    )
    server.wait_instances()
    wait_until(lambda: set(gauges) <= metered(server).keys(), "its metrics")
    # the count of the other instance
    assert 0 < metered(server)["metered_requests_total", of] < 12

    os.kill(server.pids("coordinator")[0], signal.SIGKILL)
    server.wait_linked()
    wait_until(lambda: set(gauges) <= metered(server).keys(), "the pages of both")
    assert 0 < metered(server)["metered_requests_total", of] < 12
    assert second in server.pids("executor metered")

    assert server.control("unload", "metered")[0] == 200
    wait_until(lambda: not metered(server), "the end of what is not served any more")
    assert server.control("load", "metered")[0] == 200
    assert metered(server)["metered_requests_total", of] == 0
