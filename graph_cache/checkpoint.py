"""What is in a checkpoint of the transformer: which files, which tensors, and what is wrong.

Takes a diffusers folder (the pipeline's or the transformer's, one file or a sharded index) or one
``.safetensors`` file with diffusers' or ComfyUI's key names. Everything that can be wrong is
found out from the files' headers, before any weight is read. Needs no diffusers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath

from safetensors import SafetensorError, safe_open

CLASS_NAME = "QwenImage21Transformer2DModel"
"""The transformer's class, as diffusers' configurations name it."""
INDEX = "diffusion_pytorch_model.safetensors.index.json"
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
"""What checkpoints put before the transformer's own keys."""
_FUSED = ".img_mlp.gate_up.weight"
"""ComfyUI's fused projection: the rows of gate_layer, then those of proj."""
_QUANTISED = (".comfy_quant", ".weight_scale", ".scale_weight", ".absmax")
_HEAD_DIM = 128
_TIMESTEP_CHANNELS = 256


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: rows ``start:stop`` of a tensor in a file."""

    file: FilePath
    key: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None


def locate(path: FilePath) -> tuple[list[FilePath], dict | None]:
    """Weight files and, for a folder, the configuration.

    Parameters
    ----------
    path
        A folder of the pipeline or the transformer, or a ``.safetensors`` file.

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``, or a shard is missing.
    CheckpointError
        If it is not of this transformer.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is not a .safetensors file")
        return [path], None
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder at {path}")
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    config = read_json(folder / "config.json")
    name = config.get("_class_name")
    if name != CLASS_NAME:
        raise CheckpointError(f"{folder / 'config.json'} is of a {name}, not a {CLASS_NAME}")
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map", {})
        files = [folder / shard for shard in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {folder}")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{folder / INDEX} names {file.name}, which is missing")
    return files, config


def read_json(file: FilePath) -> dict:
    """A JSON object from a file; raises CheckpointError or FileNotFoundError."""
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def scan(path: FilePath, files: list[FilePath]) -> dict[str, Source]:
    """Every parameter of the files under diffusers' names, from their headers alone.

    Raises CheckpointError if a file is damaged or quantised, or if a tensor comes twice.
    """
    found: dict[str, Source] = {}
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
                f"{file} is quantised ({some(quantised)}); ComfyUI's own loader takes it, "
                "here take the bf16 file"
            )
        for key, shape in shapes.items():
            for name, source in _rename(file, key, shape):
                if name in found:
                    raise CheckpointError(f"{file} holds {key} again, after {found[name].file}")
                found[name] = source
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found


def _rename(file: FilePath, key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Source]]:
    """A tensor under diffusers' names; ComfyUI's fused projection becomes two."""
    name = key
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            name = key[len(prefix) :]
            break
    if not name.endswith(_FUSED) or not shape or shape[0] % 2:
        yield name, Source(file, key, shape)
        return
    half = shape[0] // 2
    stem = name[: -len(_FUSED)] + ".img_mlp."
    rows = (half, *shape[1:])
    yield stem + "gate_layer.weight", Source(file, key, rows, 0, half)
    yield stem + "proj.weight", Source(file, key, rows, half, shape[0])


def infer_config(path: FilePath, sources: dict[str, Source]) -> dict:
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
            f"{path} is not a Qwen-Image-2.1 transformer: it holds {some(sources)}"
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


def expected_shapes(config: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a transformer and their shapes, under diffusers' names.

    Parameters
    ----------
    config
        As diffusers saves it, or as `infer_config` tells.
    """
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    width, context = heads * head_dim, config["context_in_dim"]
    hidden = width * config["mlp_ratio"]
    shapes: dict[str, tuple[int, ...]] = {
        "time_text_embed.timestep_embedder.linear_1": (width, _TIMESTEP_CHANNELS),
        "time_text_embed.timestep_embedder.linear_2": (width, width),
        "txt_in.text_norm": (context,),
        "txt_in.in_layer": (width, context),
        "txt_in.out_layer": (width, width),
        "img_in": (width, config["in_channels"]),
        "modulation.1": (4 * width, width),
        "norm_out.linear": (width, width),
        "proj_out": (config["out_channels"], width),
    }
    for layer in range(config["num_layers"]):
        block = f"transformer_blocks.{layer}."
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes[f"{block}attn.{name}"] = (width, width)
        for name in ("norm_q", "norm_k"):
            shapes[f"{block}attn.{name}"] = (head_dim,)
        for name in ("gate_layer", "proj"):
            shapes[f"{block}img_mlp.{name}"] = (hidden, width)
        shapes[f"{block}img_mlp.out"] = (width, hidden)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def check(
    path: FilePath, wanted: Mapping[str, tuple[int, ...]], sources: Mapping[str, Source]
) -> None:
    """Raise CheckpointError unless the files hold exactly the tensors that are wanted."""
    missing = [name for name in wanted if name not in sources]
    unknown = [source.key for name, source in sources.items() if name not in wanted]
    if len(missing) > len(wanted) // 2:
        raise CheckpointError(
            f"{path} is not a Qwen-Image-2.1 transformer: it holds {some(sources)}"
        )
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors: {some(missing)}")
    if unknown:
        raise CheckpointError(f"{path} holds {len(unknown)} unknown tensors: {some(unknown)}")
    misshapen = [
        f"{source.key} in {source.file.name} is {list(source.shape)}, not {list(wanted[name])}"
        for name, source in sources.items()
        if source.shape != wanted[name]
    ]
    if misshapen:
        raise CheckpointError(
            f"{path} holds {len(misshapen)} tensors of another shape: {some(misshapen)}"
        )


def some(names: Iterable[object]) -> str:
    """The first few of many names."""
    listed = list(map(str, names))
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
