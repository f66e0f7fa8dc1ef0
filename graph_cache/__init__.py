"""Persistent prefix K/V and CUDA-graph replay for Qwen-Image-2.1.

>>> from graph_cache import GraphCache
>>> cache = GraphCache.attach(pipe.transformer)  # doctest: +SKIP
>>> image = pipe("a red circle").images[0]  # doctest: +SKIP
>>> print(cache.report().table())  # doctest: +SKIP
"""

from .manager import GraphCache
from .reasons import REASONS, Fallback, Path, Reason
from .report import RunReport

__all__ = ["REASONS", "Fallback", "GraphCache", "Path", "Reason", "RunReport"]
__version__ = "0.1.0"
