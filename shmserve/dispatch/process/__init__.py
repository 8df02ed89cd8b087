"""Process-wide objects of a frontend: the dispatcher, and the client of the coordinator."""
