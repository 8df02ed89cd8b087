"""An MLP-Mixer (S/32) with random weights from a seed: the same code on a GPU and on the CPU.

The answers mean nothing. The model serves to measure the server, and to compare answers of a GPU
with answers of a CPU.
"""

import numpy as np

SEED = 20261121
CHANNELS, SIDE, PATCH = 3, 224, 32
GRID = SIDE // PATCH
WIDTH, LAYERS, TOKEN_WIDTH, CHANNEL_WIDTH, CLASSES = 512, 8, 256, 2048, 1000


class Model:
    device_tensors = True

    def __init__(self, context):
        self.xp = xp = context.xp
        random = np.random.default_rng(SEED)

        def drawn(rows, columns):
            """Return random weights that keep the variance of the activations."""
            weights = random.random((rows, columns), np.float32)
            weights -= 0.5
            weights *= (12 / rows) ** 0.5
            return xp.asarray(weights)

        self.stem = drawn(CHANNELS * PATCH * PATCH, WIDTH)
        self.layers = [
            (
                drawn(GRID * GRID, TOKEN_WIDTH),
                drawn(TOKEN_WIDTH, GRID * GRID),
                drawn(WIDTH, CHANNEL_WIDTH),
                drawn(CHANNEL_WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        ]
        self.head = drawn(WIDTH, CLASSES)

    def infer(self, request):
        x = patches(request.input("image")) @ self.stem
        for tokens_in, tokens_out, channels_in, channels_out in self.layers:
            x = x + (self.gelu(self.normal(x).T @ tokens_in) @ tokens_out).T
            x = x + self.gelu(self.normal(x) @ channels_in) @ channels_out
        scores = self.normal(x).mean(axis=0) @ self.head
        exponents = self.xp.exp(scores - scores.max())
        target = request.output("probabilities", (CLASSES,))
        self.xp.divide(exponents, exponents.sum(), out=target)

    def normal(self, x):
        """Return rows with mean 0 and variance 1."""
        x = x - x.mean(axis=1, keepdims=True)
        return x / self.xp.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)

    def gelu(self, x):
        """Return the sigmoid approximation of GELU."""
        return x / (1 + self.xp.exp(-1.702 * x))


def patches(image):
    """Return the image's squares, one row each."""
    squares = image.reshape(CHANNELS, GRID, PATCH, GRID, PATCH).transpose(1, 3, 0, 2, 4)
    return squares.reshape(GRID * GRID, CHANNELS * PATCH * PATCH)
