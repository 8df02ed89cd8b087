"""The gunicorn worker class and its connections: from sockets to WSGI and back."""
