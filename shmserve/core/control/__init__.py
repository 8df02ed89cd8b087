"""Control: the coordinator's decisions about running processes, from events to effects."""
