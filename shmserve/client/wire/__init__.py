"""Connections of a client to a server: HTTP, the client socket, lanes."""
