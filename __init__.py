"""ComfyUI entry of the pack. Importable without ComfyUI; nothing is loaded before it is asked for.

ComfyUI loads this file by its path and then calls `comfy_entrypoint`.
"""

from __future__ import annotations

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint():
    """The pack's extension, as ComfyUI's V3 node API asks for it."""
    from .nodes import extension

    return extension()
