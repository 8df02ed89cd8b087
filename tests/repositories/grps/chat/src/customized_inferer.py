"""Answers HTTP requests of its own making, the way an engine with a thread of its own does."""

import json
import queue
import threading

from grps_framework.context.context import GrpsContext
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class ChatInferer(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)
        self._jobs = queue.Queue()

    def load(self):
        threading.Thread(target=self._work, daemon=True).start()
        return True

    def _work(self):
        while True:
            context, words, done = self._jobs.get()
            for word in words:
                context.customized_http_stream_respond(f"data: {word}\n\n")
            done.set()

    def infer(self, inp, context: GrpsContext):
        request = context.get_http_request()
        if request.method == "GET":
            context.set_http_response(
                (
                    request.args.get("say", "nothing").encode(),
                    203,
                    {"Content-Type": "text/weird", "X-Agent": request.headers["user-agent"]},
                )
            )
            return
        body = request.get_json()
        if body.get("fail"):
            raise RuntimeError("no chat today")
        if body.get("silent"):
            return
        words = body["prompt"].split()
        if context.if_streaming():
            done = threading.Event()
            self._jobs.put((context, words, done))
            done.wait(30)
        else:
            context.set_http_response(json.dumps({"words": words, "type": request.content_type}))


inferer_register.register("chat", ChatInferer())
