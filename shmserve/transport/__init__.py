"""Between processes: sockets with descriptors, links that reconnect, pids, the run directory."""
