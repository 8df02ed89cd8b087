"""Identity of the peer of a connection."""

import os
import socket
import subprocess
import sys

import pytest

from shmserve.transport.trust import local_peers, process_identity
from shmserve.transport.trust.peer_credentials import REMOTE, caller_of, with_process
from tests.integration.region_client import OTHER_UID, as_user

IPV6 = [pytest.param(host, marks=pytest.mark.needs("ipv6")) for host in ("::1", "::ffff:127.0.0.1")]


@pytest.fixture(params=["127.0.0.1", *IPV6])
def tcp(request):
    """Return a function that connects and gives both ends."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    listener = socket.socket(family)
    opened = [listener]
    listener.bind((request.param, 0))
    listener.listen()
    listener.settimeout(10)

    def connect():
        client = socket.socket(family)
        opened.append(client)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        opened.append(server)
        return client, server

    yield connect
    for sock in opened:
        sock.close()


def addresses(sock):
    return [local_peers._address(name) for name in (sock.getpeername(), sock.getsockname())]


def test_loopback(tcp):
    _, server = tcp()
    assert caller_of(server).uid == os.geteuid()
    ends = addresses(server)
    assert local_peers._ask_kernel(*ends) == local_peers._look_up(*ends)


@pytest.mark.needs("root")
def test_another_user(tcp):
    with as_user(OTHER_UID):
        client, server = tcp()
    assert caller_of(server).uid == OTHER_UID
    client.shutdown(socket.SHUT_WR)
    assert caller_of(server).uid == OTHER_UID
    client.close()
    assert caller_of(server) == REMOTE  # the kernel's table now says uid 0


def test_a_unix_socket_tells_the_process():
    ours, _theirs = pair = socket.socketpair()
    caller = caller_of(ours)
    assert (caller.uid, caller.pid) == (os.geteuid(), os.getpid())
    assert caller.started == process_identity.started_at(os.getpid()) > 0
    for sock in pair:
        sock.close()


def test_everybody_else_is_remote():
    of = local_peers.entry_of
    assert of(("192.0.2.1", 5000), ("192.0.2.2", 8000)) is None
    assert of(("127.0.0.1", 1), ("127.0.0.1", 1)) is None
    assert of(("nonsense", 1), ("127.0.0.1", 1)) is None
    assert of((), ()) is None
    with socket.socket() as unconnected:
        assert caller_of(unconnected) == REMOTE


def test_the_process_behind_a_tcp_socket(tcp):
    client, server = tcp()
    caller = caller_of(server)
    assert caller.pid == 0
    for _ in range(2):  # looked for, and remembered
        found = with_process(caller)
        assert (found.pid, found.started) == (os.getpid(), process_identity.started_at(os.getpid()))
    client.close()
    assert with_process(caller).pid == 0


def test_a_socket_of_two_processes_is_nobodys(tcp):
    client, server = tcp()
    other = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[client.fileno()]
    )
    try:
        assert with_process(caller_of(server)).pid == 0
    finally:
        other.communicate(b"\n")
    assert with_process(caller_of(server)).pid == os.getpid()
