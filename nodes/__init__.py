"""What a ComfyUI user sees: schemas and glue. Nothing is imported before ComfyUI asks for it."""

from __future__ import annotations


def extension():
    """The ComfyUI extension; ComfyUI is imported here, when it is there for certain."""
    from comfy_api.latest import ComfyExtension

    from . import routes
    from .loader import QwenImage21DiffusersLoader
    from .model_patch import QwenImage21GraphCache
    from .sampler import QwenImage21GraphSampler
    from .status import QwenImage21GraphStatus

    class QwenImageGraphCache(ComfyExtension):
        """Registers the pack's nodes."""

        async def get_node_list(self) -> list:
            """All node classes of the pack."""
            return [
                QwenImage21GraphCache,
                QwenImage21GraphSampler,
                QwenImage21DiffusersLoader,
                QwenImage21GraphStatus,
            ]

    routes.register()
    return QwenImageGraphCache()
