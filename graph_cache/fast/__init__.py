"""The fast profile: the decode step's mathematics through other kernels.

Not bit-equal to the model's own step: products of several weights become one, elementwise chains
one pass in float32, attention the chip's best backend. What each operation ran on stands in the
report, and so does the difference to the model's own step.
"""

from __future__ import annotations

from .fused import FusedLinear, part
from .ops import Ops, TorchOps, choose_ops
from .step import FastBlock, FastModel, decode

__all__ = [
    "FastBlock",
    "FastModel",
    "FusedLinear",
    "Ops",
    "TorchOps",
    "choose_ops",
    "decode",
    "part",
]
