"""What many hosts cost: measured with a service and a balancer here, simulated for a thousand."""
