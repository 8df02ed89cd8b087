"""Counts of dropped lines, and lines that a relay hands over."""

import os
import re
import socket

import pytest

from shmserve.observe import log_output
from shmserve.observe.log_output import LogRelay
from shmserve.observe.log_writer import LogWriter
from tests.running_server import wait_until

_TWO_LINES = "x" * 500 + "\n" + "x" * 499 + "\n"


class Pipe:
    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.text = ""

    def read(self) -> str:
        try:
            while data := os.read(self.reading, 1 << 20):
                self.text += data.decode()
        except BlockingIOError:
            pass
        return self.text


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    os.close(pipe.writing)
    os.close(pipe.reading)


def test_lines_are_counted_and_not_texts(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing, str)
    for _ in range(3000):
        writer.write(_TWO_LINES)
    wait_until(lambda: len(pipe.read()) > 1_000_000 and not writer._queued, "room in the queue")
    writer.write("last\n")
    wait_until(lambda: "last" in pipe.read(), "the last line")
    told = map(int, re.findall(r"\((\d+) lines of the log", pipe.text))
    assert pipe.text.count("x\n") + sum(told) == 6000


def test_a_count_that_could_not_be_written_is_told_later() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LogWriter(writing, str)
    for _ in range(2):
        writer.write(_TWO_LINES)
        wait_until(lambda: not writer._queued, "the write that fails")
    assert writer._dropped.take() == 4
    os.close(writing)


def test_a_relay_counts_lines_and_tells_the_count_before_a_long_text(pipe: Pipe) -> None:
    relay = LogRelay(str)
    written = dropped = 0
    while dropped < 10:
        before = relay._dropped._count
        relay.write(2, _TWO_LINES)
        dropped = relay._dropped._count
        written += dropped == before
    assert dropped % 2 == 0
    receiving = relay._receiving
    for _ in range(written):
        assert receiving.recv(1 << 20, socket.MSG_DONTWAIT)
    relay.write(2, "y" * 100_000 + "end\n")
    data = receiving.recv(1 << 20, socket.MSG_DONTWAIT)
    assert data.startswith(b"\2(%d lines of the log were dropped)\n" % dropped)
    assert data.endswith(b"yend\n")
    assert len(data) == 65536
    relay._sending.close()
    receiving.close()


def test_a_receiver_goes_on_after_what_it_cannot_receive_or_place(pipe: Pipe, monkeypatch) -> None:
    monkeypatch.setattr(log_output, "_PAUSE_S", 0.0)
    writers = {2: LogWriter(pipe.writing, str)}
    monkeypatch.setattr(log_output._output, "writers", writers)
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending.send(b"\1of another descriptor\n")
    sending.send(b"\2own\n")
    receiving.send(b"unread")
    sending.close()  # over what was not read: the first receive raises ECONNRESET
    log_output.receive(receiving.detach())
    wait_until(lambda: pipe.read() == "of another descriptor\nown\n", "both lines")
