"""Loading a Qwen-Image-2.1 transformer from safetensors, straight to its device.

Takes a diffusers folder (the pipeline's or the transformer's, one file or a sharded index) or one
``.safetensors`` file with diffusers' or ComfyUI's key names. Everything that can be wrong is
found out from the files' headers, before any weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.utils.logging import tqdm
from safetensors import SafetensorError, safe_open

_INDEX = "diffusion_pytorch_model.safetensors.index.json"
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
"""What checkpoints put before the transformer's own keys."""
_FUSED = ".img_mlp.gate_up.weight"
"""ComfyUI's fused projection: the rows of gate_layer, then those of proj."""
_QUANTISED = (".comfy_quant", ".weight_scale", ".scale_weight", ".absmax")
_HEAD_DIM = 128


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class _Source:
    """Where one parameter comes from: rows ``start:stop`` of a tensor in a file."""

    file: FilePath
    key: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None


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
    files, config = _locate(path)
    sources = _scan(path, files)
    if config is None:
        config = _infer_config(path, sources)
    with torch.device("meta"):
        model = QwenImage21Transformer2DModel.from_config(config)
    _rebuild_tables(model)
    _check(path, model, sources)
    _fill(model, sources, torch.device(device), dtype, progress)
    return model.to(device).eval().requires_grad_(False)


def _locate(path: FilePath) -> tuple[list[FilePath], dict | None]:
    """Weight files and, for a folder, the configuration."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is not a .safetensors file")
        return [path], None
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder at {path}")
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    config = read_json(folder / "config.json")
    name = config.get("_class_name")
    if name != "QwenImage21Transformer2DModel":
        raise CheckpointError(
            f"{folder / 'config.json'} is of a {name}, not a QwenImage21Transformer2DModel"
        )
    if (folder / _INDEX).is_file():
        shards = read_json(folder / _INDEX).get("weight_map", {})
        files = [folder / shard for shard in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {folder}")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{folder / _INDEX} names {file.name}, which is missing")
    return files, config


def read_json(file: FilePath) -> dict:
    """A JSON object from a file; raises as `load_transformer` does."""
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def _scan(path: FilePath, files: list[FilePath]) -> dict[str, _Source]:
    """Every parameter of the files under diffusers' names, from their headers alone."""
    found: dict[str, _Source] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                keys = opened.keys()
                shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in keys}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from error
        quantised = [key for key in shapes if key.endswith(_QUANTISED)]
        if quantised:
            raise CheckpointError(
                f"{file} is quantised ({_some(quantised)}); load it in ComfyUI, or take the bf16 "
                "file here"
            )
        for key, shape in shapes.items():
            for name, source in _rename(file, key, shape):
                if name in found:
                    raise CheckpointError(f"{file} holds {key} again, after {found[name].file}")
                found[name] = source
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found


def _rename(file: FilePath, key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Source]]:
    """A tensor under diffusers' names; ComfyUI's fused projection becomes two."""
    name = key
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            name = key[len(prefix) :]
            break
    if not name.endswith(_FUSED) or not shape or shape[0] % 2:
        yield name, _Source(file, key, shape)
        return
    half = shape[0] // 2
    stem = name[: -len(_FUSED)] + ".img_mlp."
    rows = (half, *shape[1:])
    yield stem + "gate_layer.weight", _Source(file, key, rows, 0, half)
    yield stem + "proj.weight", _Source(file, key, rows, half, shape[0])


def _infer_config(path: FilePath, sources: dict[str, _Source]) -> dict:
    """The model's sizes, from the shapes of a file without a configuration."""
    blocks = [re.match(r"transformer_blocks\.(\d+)\.", name) for name in sources]
    layers = {int(match.group(1)) for match in blocks if match}
    try:
        width, channels = sources["img_in.weight"].shape
        out_channels = sources["proj_out.weight"].shape[0]
        context = sources["txt_in.in_layer.weight"].shape[1]
        hidden = sources["transformer_blocks.0.img_mlp.proj.weight"].shape[0]
    except (KeyError, ValueError, IndexError):
        raise CheckpointError(
            f"{path} is not a Qwen-Image-2.1 transformer: it holds {_some(sources)}"
        ) from None
    if width % _HEAD_DIM or hidden % width:
        raise CheckpointError(
            f"{path}: a width of {width} and a feed-forward width of {hidden} fit no "
            "Qwen-Image-2.1 transformer"
        )
    return {
        "in_channels": channels,
        "out_channels": out_channels,
        "num_layers": max(layers) + 1,
        "num_attention_heads": width // _HEAD_DIM,
        "attention_head_dim": _HEAD_DIM,
        "context_in_dim": context,
        "mlp_ratio": hidden // width,
    }


def _rebuild_tables(model: QwenImage21Transformer2DModel) -> None:
    """Make the tables that no checkpoint stores; on the meta device they have no values."""
    rope, timesteps = model.pos_embed, model.time_text_embed.time_proj
    model.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim)
    model.time_text_embed.time_proj = type(timesteps)(
        timestep_dim=timesteps.timestep_dim, time_factor=timesteps.time_factor
    )


def _check(
    path: FilePath, model: QwenImage21Transformer2DModel, sources: dict[str, _Source]
) -> None:
    """Raise CheckpointError unless the files hold exactly the model's parameters."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing = [name for name in wanted if name not in sources]
    unknown = [source.key for name, source in sources.items() if name not in wanted]
    if len(missing) > len(wanted) // 2:
        raise CheckpointError(
            f"{path} is not a Qwen-Image-2.1 transformer: it holds {_some(sources)}"
        )
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors: {_some(missing)}")
    if unknown:
        raise CheckpointError(f"{path} holds {len(unknown)} unknown tensors: {_some(unknown)}")
    misshapen = [
        f"{source.key} in {source.file.name} is {list(source.shape)}, not {list(wanted[name])}"
        for name, source in sources.items()
        if source.shape != wanted[name]
    ]
    if misshapen:
        raise CheckpointError(
            f"{path} holds {len(misshapen)} tensors of another shape: {_some(misshapen)}"
        )


def _fill(
    model: QwenImage21Transformer2DModel,
    sources: dict[str, _Source],
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


def _some(names: object) -> str:
    """The first few of many names."""
    listed = list(names)
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
