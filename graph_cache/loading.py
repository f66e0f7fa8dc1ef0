"""Loading a Qwen-Image-2.1 transformer from safetensors, straight to its device."""

from __future__ import annotations

from pathlib import Path as FilePath

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.utils.logging import tqdm
from safetensors import safe_open

from .checkpoint import CheckpointError, Source, check, infer_config, locate, read_json, scan

__all__ = ["CheckpointError", "load_transformer", "read_json"]


def load_transformer(
    path: str | FilePath,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> QwenImage21Transformer2DModel:
    """Load the transformer.

    Parameters
    ----------
    path
        A diffusers folder (of the pipeline or the transformer) or a ``.safetensors`` file.
    device
        Where the weights go; they are mapped into memory, never held twice.
    dtype
        What floating-point weights are converted to; None keeps the file's.
    progress
        Show a progress bar.

    Returns
    -------
    QwenImage21Transformer2DModel
        In eval mode, without gradients.

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``, or a shard is missing.
    CheckpointError
        If a file is damaged, quantised or of another model, or if keys are missing, unknown or of
        another shape. No weight has been read then.
    """
    path = FilePath(path).expanduser()
    files, config = locate(path)
    sources = scan(path, files)
    if config is None:
        config = infer_config(path, sources)
    with torch.device("meta"):
        model = QwenImage21Transformer2DModel.from_config(config)
    _rebuild_tables(model)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check(path, wanted, sources)
    _fill(model, sources, torch.device(device), dtype, progress)
    return model.to(device).eval().requires_grad_(False)


def _rebuild_tables(model: QwenImage21Transformer2DModel) -> None:
    """Make the tables that no checkpoint stores; on the meta device they have no values."""
    rope, timesteps = model.pos_embed, model.time_text_embed.time_proj
    model.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim)
    model.time_text_embed.time_proj = type(timesteps)(
        timestep_dim=timesteps.timestep_dim, time_factor=timesteps.time_factor
    )


def _fill(
    model: QwenImage21Transformer2DModel,
    sources: dict[str, Source],
    device: torch.device,
    dtype: torch.dtype | None,
    progress: bool,
) -> None:
    """Read every parameter to its device, file by file."""
    with tqdm(total=len(sources), desc="Loading weights", disable=not progress) as bar:
        for file in sorted({source.file for source in sources.values()}):
            with safe_open(file, framework="pt", device=str(device)) as opened:
                for name, source in sources.items():
                    if source.file != file:
                        continue
                    value = opened.get_slice(source.key)[source.start : source.stop]
                    if dtype is not None and value.is_floating_point():
                        value = value.to(dtype)
                    module, _, leaf = name.rpartition(".")
                    setattr(
                        model.get_submodule(module),
                        leaf,
                        torch.nn.Parameter(value, requires_grad=False),
                    )
                    bar.update()
