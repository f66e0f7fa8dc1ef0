"""The loader: a diffusers folder or sharded weights, through ComfyUI's own loading."""

from __future__ import annotations

import os
from pathlib import Path

import comfy.sd
import comfy.utils
import folder_paths
from comfy_api.latest import io

from ..graph_cache.checkpoint import (
    INDEX,
    CheckpointError,
    check,
    expected_shapes,
    infer_config,
    locate,
    scan,
)
from .inputs import known, schema

_FOLDERS = ("diffusion_models", "diffusers")
_DTYPES = {"default": None, "bf16": "bfloat16", "fp8_e4m3fn": "float8_e4m3fn"}


def _checkpoints() -> dict[str, Path]:
    """Folders with a transformer in them, by their path below the models folder."""
    found: dict[str, Path] = {}
    for kind in _FOLDERS:
        for root in folder_paths.get_folder_paths(kind):
            for folder, subfolders, files in os.walk(root, followlinks=True):
                if "transformer" in subfolders and "model_index.json" in files:
                    # The pipeline's folder stands for all that is in it.
                    subfolders.clear()
                elif INDEX not in files and "diffusion_pytorch_model.safetensors" not in files:
                    continue
                name = os.path.relpath(folder, root).replace(os.sep, "/")
                found.setdefault(name, Path(folder))
    return found


def load(folder: str, dtype: str = "default", disable_dynamic: bool = False) -> io.Model.Type:
    """A MODEL from a folder.

    Parameters
    ----------
    folder
        Of the pipeline or the transformer.
    dtype
        What ComfyUI keeps the weights in: a key of the node's choices.
    disable_dynamic
        Load without DynamicVRAM, where ComfyUI has it; other nodes ask for such a copy.

    Raises
    ------
    FileNotFoundError, CheckpointError
        As `graph_cache.loading.load_transformer`: names the file and what is wrong with it.
    """
    import torch

    path = Path(folder)
    files, config = locate(path)
    sources = scan(path, files)
    check(path, expected_shapes(config or infer_config(path, sources)), sources)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(comfy.utils.load_torch_file(str(file)))
    options = {} if _DTYPES[dtype] is None else {"dtype": getattr(torch, _DTYPES[dtype])}
    dynamic = known(comfy.sd.load_diffusion_model_state_dict, disable_dynamic=disable_dynamic)
    model = comfy.sd.load_diffusion_model_state_dict(weights, model_options=options, **dynamic)
    if model is None:
        raise CheckpointError(
            f"{path} is in order, but this ComfyUI does not know Qwen-Image-2.1; update ComfyUI"
        )
    # From this ComfyUI makes further copies, for hooks and for other devices.
    model.cached_patcher_init = (load, (folder, dtype))
    return model


class QwenImage21DiffusersLoader(io.ComfyNode):
    """Loads a diffusers transformer folder as a native MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as ComfyUI shows it."""
        return schema(
            node_id="QwenImage21DiffusersLoader",
            display_name="Load Qwen-Image 2.1 (diffusers folder)",
            description="Loads the transformer of a diffusers folder, sharded or not, as a native "
            "MODEL. Place the folder in models/diffusers or models/diffusion_models.",
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=sorted(_checkpoints()),
                    tooltip="A pipeline's folder, or its transformer folder.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(_DTYPES),
                    default="default",
                    tooltip="What the weights are kept in; fp8 halves the memory and changes the "
                    "picture.",
                    **known(io.Combo.Input, advanced=True),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, as ComfyUI's own loader gives it.")],
        )

    @classmethod
    def execute(cls, folder: str, weight_dtype: str = "default") -> io.NodeOutput:
        """Load it."""
        found = _checkpoints()
        if folder not in found:
            raise FileNotFoundError(
                f"no folder {folder} with a transformer in {' or '.join(_FOLDERS)}"
            )
        return io.NodeOutput(load(str(found[folder]), weight_dtype))
