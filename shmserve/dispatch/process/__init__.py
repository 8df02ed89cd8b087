"""What a frontend process has one of: the dispatcher and its link to the coordinator."""
