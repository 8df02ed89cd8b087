"""What answers which path: resources of the Falcon application."""
