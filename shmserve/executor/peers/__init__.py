"""The executor's peers: channels to frontends, and lanes to local programs, whom nobody trusts."""
