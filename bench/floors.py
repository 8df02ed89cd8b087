"""Floors under every number of the report: the best that the machine can do."""

import os
import socket

import numpy as np

from bench.turns import seconds

MIB = 1 << 20


def median_us(repeats, call):
    samples = sorted(seconds(call) for _ in range(repeats))
    return round(samples[repeats // 2] * 1e6, 2)


def memcpy_16_mib(repeats=40):
    source, target = np.ones(16 * MIB, dtype=np.uint8), np.ones(16 * MIB, dtype=np.uint8)
    return median_us(repeats, lambda: np.copyto(target, source))


def _with_child(ours, theirs, serve, measure):
    """`measure` here against `serve` in another process."""
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    try:
        return measure(ours)
    finally:
        ours.close()
        os.waitpid(pid, 0)


def seqpacket_round_trip(repeats=3000):
    def serve(sock):
        while message := sock.recv(256):
            sock.send(message)

    def measure(sock):
        return median_us(repeats, lambda: (sock.send(b"x" * 64), sock.recv(256)))

    return _with_child(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), serve, measure)


def tcp_16_mib(repeats=40):
    """Send 16 MiB over loopback and one byte back, always from and to the same memory."""
    size = 16 * MIB

    def serve(sock):
        memory = memoryview(bytearray(size))
        while True:
            got = 0
            while got < size:
                count = sock.recv_into(memory[got:], 0, socket.MSG_WAITALL)
                if not count:
                    return
                got += count
            sock.send(b"x")

    def measure(sock):
        memory = memoryview(bytearray(b"x" * size))
        return median_us(repeats, lambda: (sock.sendall(memory), sock.recv(1)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return _with_child(ours, theirs, serve, measure)


FLOORS = {
    "memcpy of 16 MiB": memcpy_16_mib,
    "SEQPACKET round trip, 64 bytes": seqpacket_round_trip,
    "TCP loopback, 16 MiB one way": tcp_16_mib,
}
