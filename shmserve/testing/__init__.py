"""Tools for tests and benchmarks: a real server, a backend, a dispatcher without a server."""
