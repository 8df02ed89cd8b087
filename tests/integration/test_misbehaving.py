"""Models that fail in every way: the error for their client, and no effect on other requests."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.holding import Hold, in_flight, replace
from tests.model_files import model_maker
from tests.running_server import RunningServer, wait_until
from tests.servers import SMALL, Server, Starting, served

BROKEN = "import nothing_of_that_name\n"
SILENT = """
class Model:
    def __init__(self, context):
        raise RuntimeError("no weights")

    def infer(self, request):
        pass
"""
MODELS = Path(__file__).parents[1] / "repositories" / "basic"
shared = served(MODELS, **SMALL)
# Server with deadlines so short that any request may miss its deadline.
hasty = served(MODELS, **SMALL, request_timeout_s=1, execute_timeout_s=3)


def command(server: RunningServer, text: str) -> tuple[int, Any]:
    document = {"inputs": [{"name": "COMMAND", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    return server.infer("misbehaving", document)


def infer_echo(server: RunningServer, value: float = 1.5) -> tuple[int, Any]:
    document = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}]}
    return server.infer("echo", document)


def echo(server: RunningServer, value: float = 1.5) -> None:
    status, answer = infer_echo(server, value)
    assert status == 200
    assert answer["outputs"][0]["data"] == [value]


def executor_of(server: RunningServer, model: str) -> int:
    (row,) = [r for r in server.show("models") if r["model"] == model]
    return int(row["pid"])


def replaced(server: RunningServer, model: str, pid: int) -> bool:
    return pid not in server.processes() and executor_of(server, model) not in (0, pid)


def test_an_executor_that_is_stopped_is_replaced(hasty: RunningServer) -> None:
    pid = executor_of(hasty, "echo")
    os.kill(pid, signal.SIGSTOP)  # a stopped process would also delay SIGTERM
    wait_until(lambda: replaced(hasty, "echo", pid), "another executor")
    hasty.wait_log("its executor gave no sign of life")
    wait_until(hasty.ready, "it has loaded")
    wait_until(lambda: infer_echo(hasty)[0] == 200, "it answers")


def test_an_executor_that_is_stopped_while_it_runs_is_replaced(
    hasty: RunningServer, tmp_path: Path
) -> None:
    pid = executor_of(hasty, "misbehaving")
    held = tmp_path / "held"
    held.touch()
    client = threading.Thread(target=command, args=(hasty, f"hold:{held}"))
    client.start()
    wait_until(Path(f"{held}.begun").exists, "it runs")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: replaced(hasty, "misbehaving", pid), "another executor")
    held.unlink()
    client.join()
    wait_until(lambda: command(hasty, "ok")[0] == 200, "it has loaded")


def test_a_model_that_holds_the_interpreter_lock_is_stopped(hasty: RunningServer) -> None:
    pid = executor_of(hasty, "misbehaving")
    assert command(hasty, "seize")[0] in (502, 504)
    wait_until(lambda: replaced(hasty, "misbehaving", pid), "another executor")
    wait_until(lambda: command(hasty, "ok")[0] == 200, "it has loaded")


@pytest.mark.parametrize(
    ("what", "status", "told"),
    [
        ("throw", 500, "no such luck"),
        ("exit", 500, "exit"),
        ("wrong_name", 500, "NOPE"),
        ("wrong_type", 500, "float64"),
        ("wrong_rank", 500, "OUT"),
        ("nothing", 500, "OUT"),
        ("nonsense", 500, "int"),
        ("greedy", 500, ""),
    ],
)
def test_the_client_is_told_and_the_executor_lives(
    shared: RunningServer, what: str, status: int, told: str
) -> None:
    before = command(shared, "ok")[1]["outputs"][0]["data"]
    got, answer = command(shared, what)
    assert got == status
    assert told.lower() in answer["error"].lower()
    for secret in ("/srv", "model.py", "Traceback", "0x", 'File "'):
        assert secret not in answer["error"]
    assert command(shared, "ok")[1]["outputs"][0]["data"] == before
    echo(shared)


def test_an_output_beyond_the_pool_is_a_clear_refusal(shared: RunningServer) -> None:
    status, answer = command(shared, f"big_output:{1 << 40}")
    assert status == 400, "no other time will do"
    assert "more than the whole pool" in answer["error"]
    assert "pool_bytes" in answer["error"]
    assert command(shared, "ok")[0] == 200


def test_os_exit_costs_its_request_only(shared: RunningServer) -> None:
    pid = command(shared, "ok")[1]["outputs"][0]["data"]
    status, answer = command(shared, "leave:3")
    assert status == 502
    assert "misbehaving" in answer["error"]
    echo(shared)
    wait_until(lambda: command(shared, "ok")[0] == 200, "the executor is not back")
    assert command(shared, "ok")[1]["outputs"][0]["data"] != pid


def test_what_a_model_has_forked_ends_with_it(shared: RunningServer, tmp_path: Path) -> None:
    told = tmp_path / "child"
    pid = command(shared, "ok")[1]["outputs"][0]["data"]
    status, answer = command(shared, f"fork_and_leave:{told}")
    # the end of the executor is seen although its child has the sockets
    assert status == 502, answer
    wait_until(lambda: not Path(f"/proc/{told.read_text()}").exists(), "the child is there")
    wait_until(lambda: command(shared, "ok")[0] == 200, "the executor is not back")
    assert command(shared, "ok")[1]["outputs"][0]["data"] != pid


def test_an_endless_loop_ends_with_its_deadline_and_then_its_executor(hasty: RunningServer) -> None:
    (pid,) = hasty.pids("executor misbehaving")
    answers: dict[str, tuple[int, Any]] = {}

    def ask(text: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({text: command(hasty, text)}))
        thread.start()
        return thread

    endless = ask("loop")
    wait_until(
        lambda: in_flight(hasty, "misbehaving/1/0") == 1 or not endless.is_alive(),
        "it does not run",
    )
    behind = ask("ok")
    endless.join()
    behind.join()
    status, answer = answers["loop"]
    assert status == 504
    assert "1 s" in answer["error"]
    assert answers["ok"][0] in (502, 504)
    wait_until(lambda: command(hasty, "ok")[0] == 200, "the executor was not replaced")
    assert hasty.pids("executor misbehaving") != [pid]
    hasty.wait_log("execute_timeout_s")


def test_a_late_answer_goes_to_nobody(hasty: RunningServer, tmp_path: Path) -> None:
    with Hold(tmp_path) as hold:
        assert command(hasty, f"hold:{hold.path}")[0] == 504
    for _ in range(20):
        status, answer = command(hasty, "ok:3")
        if status == 200:
            assert len(answer["outputs"][0]["data"]) == 3
            assert answer["outputs"][0]["data"][0] > 0
    wait_until(lambda: command(hasty, "ok")[0] == 200, "not back")


def test_kept_outputs_do_not_change_answers(shared: RunningServer) -> None:
    for _ in range(30):
        status, answer = command(shared, "keep")
        assert status == 200
        assert answer["outputs"][0]["data"] == [1.0] * 1000


def test_a_model_that_does_not_load_is_told_and_others_serve(tmp_path: Path) -> None:
    for name, source in (("broken", BROKEN), ("silent", SILENT)):
        model_maker(tmp_path)(source, (MODELS / "echo/config.pbtxt").read_text(), name)
    good = tmp_path / "echo"
    good.symlink_to(MODELS / "echo")
    with Starting(tmp_path, **SMALL) as server:

        def settled() -> bool:  # the endpoints answer 503 during the load, too
            if not server.lives():
                return False
            states = {str(row["model"]): row["state"] for row in server.show("models")}
            return states == {"broken": "UNAVAILABLE", "silent": "UNAVAILABLE", "echo": "READY"}

        wait_until(settled, "models did not settle")
        echo(server)
        assert server.get("/v2/health/ready")[0] == 503
        status, answer = server.infer("silent", {"inputs": []})
        assert status == 404
        assert json.dumps(answer).find(str(tmp_path)) < 0
        server.wait_log("no weights")


def test_a_small_pool_serves_what_fits_and_says_what_does_not() -> None:
    with Server(MODELS, **SMALL, pool_bytes=32 << 20) as server:
        echo(server)
        size = 48 << 18  # floats: 48 MiB
        body = bytes(4 * size)
        status, _, answer = server.request(
            "POST", "/v2/models/echo/infer", body, {"Inference-Header-Content-Length": "0"}
        )
        assert status == 413
        assert "pool_bytes" in json.loads(answer)["error"]
        for _ in range(3):
            status, _, answer = server.request(
                "POST",
                "/v2/models/echo/infer",
                bytes(4 << 20),
                {"Inference-Header-Content-Length": "0"},
            )
            assert status == 200
        echo(server)


def test_a_model_that_prints_without_end_leaves_room_in_the_log(tmp_path: Path) -> None:
    code = (MODELS / "echo/1/model.py").read_text()
    flood = "import os\n        print('\\n'.join(['noise'] * 50000), flush=True)"
    config = (MODELS / "echo/config.pbtxt").read_text()
    model_maker(tmp_path)(code.replace("pass", flood), config, "echo")
    with Server(tmp_path, **SMALL) as server:
        assert server.log().count("noise") < 25000
        server.stop()


def test_a_pool_too_small_for_its_processes_is_told_and_not_ready() -> None:
    with Starting(MODELS, pool_bytes=3 << 20) as server:
        server.wait_log("SHMSERVE_POOL_BYTES to 14680064 or more")
        wait_until(server.lives, "HTTP")
        why = "3072 KiB of shared memory are too little for 7 processes"

        def told() -> bool:
            status, answer = server.get("/v2/health/ready")[:2]
            return status == 503 and why in answer["error"]

        wait_until(told, "the reason")
        replace(server, "coordinator")
        server.wait_linked()
        wait_until(told, "it is no better for a successor")
