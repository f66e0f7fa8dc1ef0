"""Adapter for ComfyUI's native Qwen-Image-2.1, and the wrappers that bring its calls here.

Importable without ComfyUI: what is asked of ComfyUI itself stands in `core`, which imports it when
it is called.
"""

from __future__ import annotations

from .runtime import Options, Runtime, patch

__all__ = ["Options", "Runtime", "patch"]
