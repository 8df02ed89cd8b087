"""Command ``shmserve measure``: sends requests to a model over each transport, and times them."""
