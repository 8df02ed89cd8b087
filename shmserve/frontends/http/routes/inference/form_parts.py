"""Forms (multipart/form-data) as parts with name and content, within bounds."""

from __future__ import annotations

from io import BytesIO

import falcon
from falcon.media import MultipartFormHandler
from falcon.media.multipart import MultipartParseOptions

from shmserve.errors import InvalidArgument
from shmserve.frontends.http.openapi import FORM
from shmserve.protocol.oip.json_calls import MAX_PARTS, Parts

MAX_PART_HEADER_BYTES = 4096
MAX_NAME = 256  # characters
FORM_COST = 3  # heap bytes per byte: the body, the parts, and the parts as one tensor

_OPTIONS = MultipartParseOptions()
_OPTIONS.max_body_part_count = MAX_PARTS
_OPTIONS.max_body_part_headers_size = MAX_PART_HEADER_BYTES
_handler = MultipartFormHandler(_OPTIONS)


def is_form_type(content_type: str | None) -> bool:
    """Return True if a Content-Type is that of a form."""
    return (content_type or "").partition(";")[0].strip().lower() == FORM


def form_parts(body: bytes, content_type: str) -> Parts:
    """Return the parts of a form, in order. Raise InvalidArgument for a body that is no form, or
    has too many parts, or a part without a name."""
    parts: list[tuple[str, bytes]] = []
    try:
        for part in _handler.deserialize(BytesIO(body), content_type, len(body)):
            name = part.name
            if not name or len(name) > MAX_NAME:
                where = f"part {len(parts) + 1} of the form"
                raise InvalidArgument(f"{where} has no name of at most {MAX_NAME} characters")
            parts.append((name, part.stream.read()))
    except falcon.HTTPError as ex:
        raise InvalidArgument(f"the form cannot be read: {ex.description or ex.title}") from None
    except ValueError:  # UnicodeError included
        raise InvalidArgument("the form cannot be read: a header is not valid text") from None
    return parts
