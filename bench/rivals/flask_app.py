"""GRPS server over HTTP without a data plane: Flask, json_format, an echo.

    python -m bench.rivals.flask_app PORT

The server decodes and encodes as GRPS's documentation describes, and runs no model.
"""

from __future__ import annotations

import sys

from flask import Flask, Response, request
from google.protobuf import json_format

from shmserve._generated import grps_pb2 as pb

app = Flask(__name__)


@app.post("/grps/v1/infer/predict")
def predict() -> Response:
    message = json_format.ParseDict(request.get_json(), pb.GrpsMessage())
    message.status.code, message.status.msg, message.status.status = 200, "OK", 1
    text = json_format.MessageToJson(message, preserving_proto_field_name=True)
    return Response(text, content_type="application/json")


if __name__ == "__main__":
    app.run("127.0.0.1", int(sys.argv[1]), threaded=True)
