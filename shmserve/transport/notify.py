"""Messages to systemd about the service (sd_notify): one datagram, no library."""

import logging
import socket
from collections.abc import Sequence

from shmserve.log_fields import log_fields

_log = logging.getLogger(__name__)


class Notifier:
    """Sends lines to the service manager; does nothing outside of a service (empty `address`)."""

    def __init__(self, address: str) -> None:
        self.address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str, fds: Sequence[int] = (), patience_s: float = 0.0) -> bool:
        """Send lines, and descriptors beside them (FDSTORE=1). Return False if the service manager
        took nothing for `patience_s`, or was not reached."""
        if not self.address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(patience_s)
                sock.connect(self.address)
                socket.send_fds(sock, ["\n".join(lines).encode()], list(fds))
        except OSError as ex:
            _log.debug("the service manager was not reached", extra=log_fields(error=ex))
            return False
        return True
