"""Connections of clients below the protocols: accepting, refusing, and the book of open ones."""
