"""What tests and benchmarks run against: a real server, a backend, a dispatcher without one."""
