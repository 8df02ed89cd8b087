"""Generations: how a service passes sockets, memory and its place to the next generation."""
