"""What a ComfyUI user sees. No node is offered yet: the engine is used from Python so far."""

from __future__ import annotations


def extension():
    """The ComfyUI extension; ComfyUI is imported here, when it is there for certain."""
    from comfy_api.latest import ComfyExtension

    class QwenImageGraphCache(ComfyExtension):
        """Registers the pack's nodes."""

        async def get_node_list(self) -> list:
            """All node classes of the pack."""
            return []

    return QwenImageGraphCache()
