"""Tests that a TLS connection looks for plain HTTP once its first byte is there."""

import socket
import ssl

import pytest

from shmserve.frontends.grpc.http2_engine.transports import TlsTransport


def test_plain_http_is_found_though_nothing_had_arrived_at_first():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    transport = TlsTransport.__new__(TlsTransport)
    tls = context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
    transport._tls, transport._shaken, transport._greeted = tls, False, False
    with tls, theirs:
        with pytest.raises(BlockingIOError):
            transport._shake()
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionAbortedError, match="does not speak TLS"):
            transport._shake()
