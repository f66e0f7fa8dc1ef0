"""Adapter for ComfyUI's native Qwen-Image-2.1, and the wrappers that bring its calls here.

Importable without ComfyUI: what is asked of ComfyUI itself stands in `core`, which imports it when
it is called.
"""

from __future__ import annotations

from .options import Live, Options
from .runtime import Runtime, patch

__all__ = ["Live", "Options", "Runtime", "patch"]
