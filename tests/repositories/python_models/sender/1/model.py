"""Obeys COMMAND, word by word.

`send:A` sends A, `last:A` with the final flag, `final` the flag alone; `return:A` and `raise:A`
end the command. A sender's refusal is the answer to the next `told`. A command that begins with
`async` runs as a coroutine, in which `meet:N` waits until N requests wait for each other.
"""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


def said(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([text], object))])


class TritonPythonModel:
    def initialize(self, args):
        self.refused = []
        self.waiting = 0

    def execute(self, requests):
        (request,) = requests
        words = request.inputs()[0].as_numpy()[0].decode().split()
        if words[0] == "async":
            return self.run_later(request, words[1:])
        return self.run(request, words)

    async def run_later(self, request, words):
        while words and words[0].startswith("meet:"):
            self.waiting += 1
            while self.waiting % int(words[0][5:]):
                await asyncio.sleep(0.001)
            words = words[1:]
        return self.run(request, words)

    def run(self, request, words):
        for word in words:
            what, _, text = word.partition(":")
            if what == "return":
                return [said(text)]
            if what == "raise":
                raise ValueError(text)
            if what == "told":
                refused, self.refused = self.refused, []
                return [said("|".join(refused))]
            self.send(request.get_response_sender(), what, text)
        return None

    def send(self, sender, what, text):
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            if what == "final":
                sender.send(flags=final)
            else:
                sender.send(said(text), final if what == "last" else 0)
        except pb_utils.TritonModelException as ex:
            self.refused.append(str(ex))
