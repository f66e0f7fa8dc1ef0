"""A real ComfyUI server with this pack in its custom_nodes, for as long as a test needs it."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import comfy_env

_HERE = Path(__file__).resolve().parent


class ComfyUIServer:
    """The server, and a client for it.

    Parameters
    ----------
    base
        An empty folder for models, outputs and custom nodes.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("custom_nodes", "models", "input", "output", "temp", "user"):
            (base / name).mkdir()
        (base / "custom_nodes" / "qwen_image_graph_cache").symlink_to(comfy_env.REPOSITORY)
        (base / "custom_nodes" / "fixture_pack").symlink_to(_HERE / "fixture_pack")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = base / "log.txt"
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ComfyUIServer:
        command = [sys.executable, str(_HERE / "launch.py"), str(comfy_env.comfyui_path())]
        command += ["--cpu", "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--use-pytorch-cross-attention", "--disable-api-nodes"]
        command += ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended:\n{self.log.read_text()[-4000:]}")
            try:
                self.get("/system_stats")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return self
        self.__exit__()
        raise TimeoutError(f"ComfyUI did not start:\n{self.log.read_text()[-4000:]}")

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, content: dict):
        request = urllib.request.Request(
            self.url + path,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code} {error.read().decode()}") from error
        return json.loads(text) if text else None

    def run(self, workflow: dict, client: str = "test") -> dict:
        """Queue a workflow in API format and wait; the history's entry."""
        extra = {"extra_pnginfo": {"workflow": {"id": "the workflow of the tests"}}}
        content = {"prompt": workflow, "client_id": client, "extra_data": extra}
        number = self.post("/prompt", content)["prompt_id"]
        until = time.monotonic() + 120
        while time.monotonic() < until:
            history = self.get(f"/history/{number}")
            if number in history:
                return history[number]
            time.sleep(0.1)
        raise TimeoutError(f"the workflow did not end:\n{self.log.read_text()[-4000:]}")

    def events(self, client: str = "test") -> queue.Queue:
        """What the server sends to a browser: JSON messages, and text in binary ones."""
        import asyncio

        import aiohttp

        received: queue.Queue = queue.Queue()
        connected = threading.Event()

        async def listen():
            address = f"{self.url}/ws?clientId={client}"
            async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
                connected.set()
                async for message in socket:
                    text = message.type is aiohttp.WSMsgType.TEXT
                    received.put(json.loads(message.data) if text else message.data)

        threading.Thread(target=lambda: asyncio.run(listen()), daemon=True).start()
        assert connected.wait(30)
        return received
