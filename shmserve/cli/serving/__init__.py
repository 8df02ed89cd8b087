"""Commands for setting up, starting and replacing a service."""

from pathlib import Path

from shmserve.errors import ConfigError


def shipped(inside: str, beside: str, subject: str) -> Path:
    """Return a shipped file or folder: `inside` the package in a wheel, `beside` it in a checkout.
    Raise ConfigError, with the beginning `subject`, if both are missing."""
    package = Path(__file__).absolute().parents[2]
    for place in (package / inside, package.parent / beside):
        if place.exists():
            return place
    raise ConfigError(f"{subject} missing from this installation")
