"""What a cluster decides, without Ray, sockets or a clock: time and reports are arguments."""
