"""Local programs: the client socket, and lanes to executors."""
