"""Two routes for the readout: what is held, and give it back.

They are ComfyUI's own kind of routes, so its rules of origin hold for them.
"""

from __future__ import annotations

import asyncio
import json

from .running import release, status
from .status import prompt_server, readout_is_there

STATUS = "/qwen_image_graph/status"
RELEASE = "/qwen_image_graph/release"
_MOST_BYTES = 1024


def register() -> None:
    """Add the routes to ComfyUI's server, if there is one."""
    server = prompt_server()
    if server is None:
        return
    from aiohttp import web

    @server.routes.get(STATUS)
    async def get_status(request: web.Request) -> web.Response:
        """Every node's cache: bytes held, last report."""
        if request.query.get("readout"):
            readout_is_there()
        return web.json_response({"nodes": await asyncio.to_thread(status)})

    @server.routes.post(RELEASE)
    async def post_release(request: web.Request) -> web.Response:
        """Give back what a node's cache holds, or what all hold: ``{"node": "12"}`` or ``{}``."""
        body = await request.content.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            return _refuse(413, f"a request of more than {_MOST_BYTES} bytes")
        try:
            content = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            return _refuse(400, "the request is not JSON")
        if not isinstance(content, dict) or not set(content) <= {"node"}:
            return _refuse(400, "the request must be an object with nothing but 'node'")
        node_id = content.get("node")
        if node_id is not None and not isinstance(node_id, str):
            return _refuse(400, "'node' must be a node's id as a string")
        try:
            # In a thread: a step may be running, which has to end first.
            released = await asyncio.to_thread(release, node_id)
        except KeyError:
            return _refuse(404, f"node {node_id} has no cache")
        return web.json_response({"released": released})

    def _refuse(code: int, why: str) -> web.Response:
        return web.json_response({"error": why}, status=code)
