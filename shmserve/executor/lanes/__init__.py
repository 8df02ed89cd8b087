"""Lanes: channels that local programs, whom nobody trusts, have to this executor."""
