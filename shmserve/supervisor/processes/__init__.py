"""Processes of the service: started, adopted, watched, restarted and stopped."""
