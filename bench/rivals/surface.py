"""The HTTP surface all rivals share: one Falcon resource for binary inference requests.

It does as little as a correct answer needs, so that a rival never loses on its HTTP side.
"""

import json

import falcon

from shmserve.frontends.http.server.response import BufferBody

HEADER = "HTTP_INFERENCE_HEADER_CONTENT_LENGTH"


def read_tensor(environ):
    """The binary tensor of a request whose body is JSON and one FP32 tensor."""
    json_size = int(environ[HEADER])
    size = int(environ["CONTENT_LENGTH"]) - json_size
    body = environ["wsgi.input"]
    json.loads(body.read(json_size))
    tensor = bytearray(size)
    if hasattr(body, "readinto"):
        if body.readinto(memoryview(tensor)) != size:
            raise falcon.HTTPBadRequest
    else:
        tensor[:] = body.read(size)
    return tensor


class Infer:
    def __init__(self, infer):
        self._infer = infer

    def on_post(self, req, resp, name):
        try:
            output = memoryview(self._infer(req.env, name))
        except Exception as ex:
            raise falcon.HTTPInternalServerError(title=f"{type(ex).__name__}: {ex}") from ex
        head = json.dumps(
            {
                "model_name": name,
                "model_version": "1",
                "outputs": [
                    {
                        "name": "OUTPUT0",
                        "datatype": "FP32",
                        "shape": [output.nbytes // 4],
                        "parameters": {"binary_data_size": output.nbytes},
                    }
                ],
            },
            separators=(",", ":"),
        ).encode()
        resp.content_type = "application/octet-stream"
        resp.set_header("Inference-Header-Content-Length", str(len(head)))
        resp.set_header("Content-Length", str(len(head) + output.nbytes))
        resp.stream = BufferBody([head, output])


class Ready:
    def on_get(self, req, resp):
        resp.media = {}


def create_app(infer):
    app = falcon.App()
    app.add_route("/v2/models/{name}/infer", Infer(infer))
    app.add_route("/v2/health/ready", Ready())
    return app
