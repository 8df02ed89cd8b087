"""What should run and what does: the coordinator's decisions, from events to effects."""
