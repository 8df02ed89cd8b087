"""Executor that speaks Link and runs no model; `spec.parameters` set its behaviour."""

import argparse
import os
import select
import signal
import sys
import time

import msgspec

from shmserve import config
from shmserve.protocol.control.link_messages import Instance, Loaded, LoadFailed
from shmserve.transport.link import Link, LinkHandlers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    arguments = parser.parse_args()
    instance = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Instance)
    behaviour = instance.spec.parameters
    run_dir = config.run_dir(config.load())
    wake = os.eventfd(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_stop = behaviour.get("ignore_stop") == "yes"
    signal.signal(signal.SIGTERM, lambda *_: None if ignore_stop else os.eventfd_write(wake, 1))
    flag = os.path.join(run_dir, "busy-" + instance.name.replace("/", "-"))
    state: dict[str, Loaded | None] = {"loaded": None}
    link = Link(
        run_dir,
        "executor",
        arguments.process_id,
        LinkHandlers(
            on_trim=lambda nbytes: None,
            on_stats=lambda what: {"busy_ms": 10_000_000 if os.path.exists(flag) else 0},
            on_stop=lambda reason: None if ignore_stop else os.eventfd_write(wake, 1),
            held_bytes=lambda: 1000,
            loaded=lambda: state["loaded"],
        ),
        instance.name,
    )
    link.start()
    if behaviour.get("load") == "fail":
        link.send(LoadFailed(instance.name, "the model says no"))
        link.close()
        sys.exit(1)
    if behaviour.get("load") == "hang":
        time.sleep(3600)
    state["loaded"] = loaded = Loaded(instance.name, instance.spec, f"{arguments.process_id}.sock")
    link.send(loaded)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(arguments.master_fd, select.POLLIN)
    poll.poll(120_000)  # an executor of a killed test must not live on for long
    link.close()


main()
