"""Run as root where /proc hides other users' processes: is a client's end noticed all the same?

Prints what went wrong, or nothing.
"""

import os
import socket

from shmserve.coordinator.regions.owners import Owners
from shmserve.core.registry import Region
from shmserve.transport.processes import has_ended
from shmserve.transport.trust.peer_credentials import caller_of

SERVER, CLIENT = 65534, 12345


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)  # group 0 sees everybody
    os.setresuid(user, user, user)


def main() -> None:
    address = f"\0shmserve-hidden-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        client = os.fork()
        if not client:
            become(CLIENT)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(30.0)
                sock.connect(address)
                sock.recv(1)
            os._exit(0)
        become(SERVER)
        assert not os.path.exists(f"/proc/{client}"), "/proc hides nothing"
        sock = listener.accept()[0]
    caller = caller_of(sock)
    assert (caller.uid, caller.pid) == (CLIENT, client), caller
    region = Region("r", 1, "/r", 0, 8, caller.uid, caller.pid, caller.started)
    watched: list[int] = []
    owners = Owners(lambda pidfd, process: watched.append(pidfd), lambda pidfd: None, True)
    assert owners.add(region), "a living owner was taken for dead"
    assert not has_ended(watched[0])
    sock.close()
    assert has_ended(watched[0], 10.0), "its end was not noticed"
    os.waitpid(client, 0)
    owners.remove(region)
    assert not owners.add(region), "a dead owner was taken for living"


main()
