"""Messages of GRPS, their names and what models say about them: bytes to values and back (pure)."""
