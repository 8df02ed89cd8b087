"""Regions: client memory by name, and the rules for registering, using, listing and removing
regions."""
