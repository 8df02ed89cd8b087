"""HAProxy servers as slots for addresses: the commands for HAProxy's stats socket.

Each model has a backend, made by `haproxy_config`. The servers of a backend come from a template
and all exist from the start, in maintenance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shmserve.errors import Unavailable

NODES = ""  # in place of a model name: the backend for requests that name no model
# admin states of `show servers state`: forced maintenance, inherited maintenance
_MAINTENANCE = 0x01 | 0x20
_DRAINS = 0x08  # admin state: forced drain


@dataclass(frozen=True)
class Address:
    """Host and port where a service listens, and the HTTP port for health checks."""

    host: str
    port: int
    check_port: int


@dataclass(frozen=True)
class ServerSlot:
    """Server of a HAProxy backend.

    Attributes:
        taken: the server gets requests while healthy.
        drains: the server only ends its running requests. Neither flag: maintenance.
    """

    backend: str
    server: str
    host: str
    port: int
    weight: int
    taken: bool
    drains: bool = False


def backend(door: str, model: str) -> str:
    """Return the name of a backend.

    Args:
        door: "http" or "grpc".
        model: model name, or NODES for the backend of all nodes.
    """
    return f"{door}_model_{model}" if model else f"{door}_nodes"


def slots(text: str) -> list[ServerSlot]:
    """Parse the answer to ``show servers state``.

    Raises:
        Unavailable: the text is not such an answer.
    """
    lines = text.strip().splitlines()
    if len(lines) < 2 or lines[0].strip() != "1" or not lines[1].startswith("# "):
        raise Unavailable("the balancer's answer to 'show servers state' cannot be read")
    names = lines[1][2:].split()
    rows = (dict(zip(names, line.split(), strict=False)) for line in lines[2:])
    return [_slot(row) for row in rows if row]


def _slot(row: Mapping[str, str]) -> ServerSlot:
    try:
        return ServerSlot(
            row["be_name"],
            row["srv_name"],
            row["srv_addr"],
            int(row["srv_port"]),
            int(row["srv_uweight"]),
            not int(row["srv_admin_state"]) & (_MAINTENANCE | _DRAINS),
            bool(int(row["srv_admin_state"]) & _DRAINS),
        )
    except (KeyError, ValueError) as ex:
        raise Unavailable("the balancer's list of servers cannot be read") from ex


def changes(
    found: list[ServerSlot], wanted: Mapping[str, Mapping[Address, int]]
) -> tuple[list[str], list[str]]:
    """Return the commands that turn the slots found into the wanted weights of addresses, by
    backend. Also return problems as text, such as a backend with too few slots. Backends not in
    `wanted` are left alone."""
    commands: list[str] = []
    problems: list[str] = []
    for name, addresses in sorted(wanted.items()):
        backend_slots = [slot for slot in found if slot.backend == name]
        commands += _of_backend(backend_slots, dict(addresses), problems, name)
    return commands, problems


def _of_backend(
    backend_slots: list[ServerSlot], wanted: dict[Address, int], problems: list[str], name: str
) -> Iterator[str]:
    """Yield the commands for a backend. An address that leaves is drained, because maintenance
    would end its running requests."""
    by_place = {(address.host, address.port): address for address in wanted}
    free = []
    for slot in sorted(backend_slots, key=lambda slot: not slot.taken):
        address = by_place.pop((slot.host, slot.port), None) if _known(slot) else None
        if address is None:
            free.append(slot)
            if slot.taken:
                yield f"set server {name}/{slot.server} state drain"
        elif not slot.taken:
            yield from _fill(f"{name}/{slot.server}", address, wanted[address])
        elif slot.weight != wanted[address]:
            yield f"set server {name}/{slot.server} weight {wanted[address]}"
    # slots that may have running requests are reused last
    free.sort(key=lambda slot: (slot.taken, slot.drains))
    for address, slot in zip(by_place.values(), free, strict=False):
        yield from _fill(f"{name}/{slot.server}", address, wanted[address])
    if len(by_place) > len(free):
        problems.append(
            f"backend {name}: {len(by_place) - len(free)} slots are missing (haproxy_slots)"
        )


def _known(slot: ServerSlot) -> bool:
    """Return True if the slot's address was set by a controller, False if it comes from the
    template."""
    return slot.taken or slot.drains


def _fill(server: str, address: Address, weight: int) -> Iterator[str]:
    yield (f"set server {server} addr {address.host} port {address.port}")
    yield f"set server {server} check-port {address.check_port}"
    yield f"set server {server} weight {weight}"
    yield f"set server {server} state ready"
