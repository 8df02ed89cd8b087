"""Resources of the Falcon application, by subject."""
