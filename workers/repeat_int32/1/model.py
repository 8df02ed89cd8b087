"""Sends any number of answers from a thread of its own, to any number of requests at once."""

import threading
import time


class Model:
    def infer(self, request):
        values, delays = request.input("IN"), request.input("DELAY")
        if values.shape != delays.shape:
            raise ValueError(f"IN has shape {list(values.shape)}, DELAY {list(delays.shape)}")
        threading.Thread(target=send_all, args=(request, values, delays), daemon=True).start()
        time.sleep(int(request.input("WAIT")[0]) / 1000)


def send_all(request, values, delays):
    for index, value in enumerate(values):
        time.sleep(int(delays[index]) / 1000)
        if request.cancelled:
            break
        request.output("OUT", (1,))[:] = value
        request.output("IDX", (1,))[:] = index
        request.send()
    request.finish()
