"""Memory shared by client and server: blocks on the host and on GPUs."""
