"""Client connections below the protocols: accepting, refusing, and the list of open connections."""
