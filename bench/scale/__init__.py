"""Cost of many hosts: measured with a service and a balancer on this machine, simulated for a
thousand."""
