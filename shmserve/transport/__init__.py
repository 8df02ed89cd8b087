"""Transport between processes: channels, the coordinator's links, locks, the run directory,
sockets."""
