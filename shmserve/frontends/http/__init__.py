"""The HTTP application of Falcon, under gunicorn's workers: routes, errors, compression."""
