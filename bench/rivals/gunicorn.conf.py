"""No settings: keeps gunicorn from reading the service's own file in the working directory."""
