"""From one generation of a service to the next: sockets, memory, the handover."""
