"""The client's connections to a server: HTTP, the client socket, lanes."""
