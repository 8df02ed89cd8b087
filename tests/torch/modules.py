"""Modules to be scripted; imported only where torch is."""

from typing import Dict, List, Optional  # noqa: UP035 - what TorchScript reads

import torch
from torch import Tensor


class AddSub(torch.nn.Module):
    def forward(self, x, y):
        return x + y, x - y


class Double(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Vast(torch.nn.Module):
    def forward(self, x):
        return torch.empty([1 << 50], device=x.device)


class Every2nd(torch.nn.Module):
    def forward(self, x):
        return x.reshape(-1)[::2]


class Same(torch.nn.Module):
    def forward(self, x):
        return x


class InPlace(torch.nn.Module):
    def forward(self, x):
        part = x.view(-1)
        part.mul_(2)
        return x


class Named(torch.nn.Module):
    def forward(self, x):
        return {"TWICE": x * 2, "SAME": x}


class Listed(torch.nn.Module):
    def forward(self, x):
        return [x, x + 1]


class Transposed(torch.nn.Module):
    def forward(self, x):
        return x.t()


class Dictionary(torch.nn.Module):
    def forward(self, d: Dict[str, Tensor]):  # noqa: UP006
        return d["a"] + d["b"]


class Maybe(torch.nn.Module):
    def forward(self, x, y: Optional[Tensor] = None):  # noqa: UP045
        if y is not None:
            return x + y
        return x + 100


class Number(torch.nn.Module):
    def forward(self, x):
        return 5


class Texts(torch.nn.Module):
    def forward(self, s: List[str]):  # noqa: UP006
        return [t + "!" for t in s]
