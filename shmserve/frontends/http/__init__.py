"""HTTP application of Falcon for gunicorn's workers: routes, errors, compression."""
