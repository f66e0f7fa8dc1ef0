"""Write the small model as files for ComfyUI's native loaders: ``diffusion_models/`` and ``vae/``.

The transformer's file is taken as it is. The VAE's is made to fit, without a change of what it
computes:

- ComfyUI reads a VAE's two base widths from the file, but takes the levels (1, 2, 4, 8, 8 times
  that) and two blocks a level for granted. A VAE of levels 1, 2, 4, 4, 4 or of one block a level
  is padded: its channels become the odd ones of twice as many, the even ones stay zero, and an
  added block adds nothing.
- ComfyUI normalises latents with the statistics of the published VAE, whatever the file. The two
  1 x 1 convolutions next to the latents are rescaled, so that the latents that the transformer
  sees are those of diffusers with the statistics of the folder. A LATENT in between, as a VAE
  Encode node returns it, is that latent times the published deviation plus the published mean.

ComfyUI samples this model with a fixed shift of levels. A ModelSamplingFlux node with both shifts
at the logarithm of ``shift`` in the folder's scheduler gives the levels that it was trained for.

The text encoder is not exported: ComfyUI knows Qwen3-VL in the published sizes only.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from safetensors.torch import load_file, save_file

from graph_cache.checkpoint import (
    CheckpointError,
    check,
    expected_shapes,
    locate,
    read_json,
    scan,
    some,
)

NAME = "qwen_image_2.1_tiny"
LEVELS = (1, 2, 4, 8, 8)
"""Widths of the VAE's levels in ComfyUI, in base widths."""
_NARROW = (1, 2, 4, 4, 4)
_BLOCKS = 2
_PUBLISHED = {
    name: parameter.default
    for name, parameter in inspect.signature(AutoencoderKLQwenImage21.__init__).parameters.items()
    if name != "self"
}
"""Of the published VAE: its sizes, and the statistics that ComfyUI has built in."""
_FIXED = ("z_dim", "attn_scales", "temperal_downsample", "is_residual", "patch_size")
_FIXED += ("in_channels", "out_channels")

_NAMES = (
    (r"^quant_conv", "conv1"),
    (r"^post_quant_conv", "conv2"),
    (r"\.conv_in", ".conv1"),
    (r"\.norm_out", ".head.0"),
    (r"\.conv_out", ".head.2"),
    (r"mid_block\.resnets\.0", "middle.0"),
    (r"mid_block\.attentions\.0", "middle.1"),
    (r"mid_block\.resnets\.1", "middle.2"),
    (r"(down|up)_blocks\.(\d)\.resnets", r"\1samples.\2.\1samples"),
    (r"down_blocks\.(\d)\.downsampler", rf"downsamples.\1.downsamples.{_BLOCKS}"),
    (r"up_blocks\.(\d)\.upsampler", rf"upsamples.\1.upsamples.{_BLOCKS + 1}"),
    (r"\.(\d)\.norm1", r".\1.residual.0"),
    (r"\.(\d)\.conv1", r".\1.residual.2"),
    (r"\.(\d)\.norm2", r".\1.residual.3"),
    (r"\.(\d)\.conv2", r".\1.residual.6"),
    (r"conv_shortcut", "shortcut"),
)
_PARTS = ("weight", "bias")
_PLANE = re.compile(r"(resample\.1|to_qkv|proj)\.weight$")
"""Convolutions that are 2-D in ComfyUI too; the others have a time axis of length 1 there."""
_TWICE = re.compile(
    r"^encoder\.(down_blocks\.3\.downsampler\.resample\.1|down_blocks\.4\.resnets\.\d\.conv2"
    r"|mid_block\.resnets\.\d\.conv2|mid_block\.attentions\.0\.proj)\."
)
"""What writes to the encoder's stream where a padded one has twice the values, see `widen`."""


def comfyui_name(key: str) -> str:
    """ComfyUI's name for a parameter of a VAE of ComfyUI's levels."""
    for pattern, name in _NAMES:
        key = re.sub(pattern, name, key)
    return key


def widen(state: Mapping[str, torch.Tensor], config: Mapping) -> dict[str, torch.Tensor]:
    """Parameters of a VAE of ComfyUI's levels that computes the same, under diffusers' names.

    Parameters
    ----------
    state
        Of the VAE that ``config`` is of.
    config
        As diffusers saves it.
    """
    narrow = tuple(config["dim_mult"]) != LEVELS
    wide = _shapes({**config, "dim_mult": list(LEVELS), "num_res_blocks": _BLOCKS})
    made = {}
    for key, shape in wide.items():
        if key in state:
            value = state[key].clone()
        elif key.endswith("conv_shortcut.weight"):
            # Where only the wide one changes its width, the narrow one passes its input on.
            value = torch.eye(min(shape[:2]))[:, :, None, None]
        else:
            value = torch.zeros(shape)
        if narrow and "to_qkv" in key:
            # Attention divides by the root of the width.
            value[: len(value) // 3] *= math.sqrt(2)
        if narrow and _TWICE.match(key):
            # The shortcut of level 3 averages 8 values into one: half of them belong to a frame
            # before the first and are zero. With twice the channels it averages 4, and the odd
            # channels get those of the frame itself: twice the value. So has the rest from there
            # on; the norm at the end does not see it.
            value *= 2
        if key.endswith("gamma") and shape[0] != len(value):
            value /= math.sqrt(2)
        target = torch.zeros(shape)
        odd = (slice(int(w != n), None, w // n) for w, n in zip(shape, value.shape))
        target[tuple(odd)] = value
        made[key] = target
    return made


def fold_statistics(
    state: Mapping[str, torch.Tensor], mean: list[float], std: list[float]
) -> dict[str, torch.Tensor]:
    """The parameters with ComfyUI's statistics of latents in the place of ``mean`` and ``std``."""
    own, theirs = (
        [torch.tensor(values, dtype=torch.float64) for values in pair]
        for pair in ((mean, std), (_PUBLISHED["latents_mean"], _PUBLISHED["latents_std"]))
    )
    scale = theirs[1] / own[1]
    state = dict(state)
    names = [f"{conv}.{part}" for conv in ("quant_conv", "post_quant_conv") for part in _PARTS]
    into, into_bias, out, out_bias = (state[name].double() for name in names)
    # Means come first, then logarithms of variances.
    rows = torch.cat([scale, torch.ones_like(scale)])
    into = into * rows[:, None, None, None]
    shift = torch.cat([theirs[0] - own[0] * scale, 2 * scale.log()])
    into_bias = into_bias * rows + shift
    out_bias = out_bias + out[:, :, 0, 0] @ (own[0] - theirs[0] / scale)
    out = out / scale[:, None, None]
    for name, value in zip(names, (into, into_bias, out, out_bias)):
        state[name] = value.float()
    return state


def comfyui_vae(state: Mapping[str, torch.Tensor], config: Mapping) -> dict[str, torch.Tensor]:
    """The VAE's parameters as ComfyUI's loader takes them; arguments as of `widen`."""
    state = widen({key: value.float() for key, value in state.items()}, config)
    state = fold_statistics(state, config["latents_mean"], config["latents_std"])
    return {
        comfyui_name(key): value
        if key.endswith(("bias", "gamma")) or _PLANE.search(key)
        else value[:, :, None]
        for key, value in state.items()
    }


def _shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoencoderKLQwenImage21.from_config(dict(config))
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _read_vae(folder: Path) -> dict[str, torch.Tensor]:
    """What goes to ComfyUI's VAE file, or CheckpointError or FileNotFoundError."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    about, file = folder / "config.json", folder / "diffusion_pytorch_model.safetensors"
    config = read_json(about)
    if config.get("_class_name") != "AutoencoderKLQwenImage21":
        raise CheckpointError(
            f"{about} is of a {config.get('_class_name')}, not an AutoencoderKLQwenImage21"
        )
    config = {**_PUBLISHED, **config}
    wrong = [name for name in _FIXED if config[name] != _PUBLISHED[name]]
    wrong += [] if tuple(config["dim_mult"]) in (LEVELS, _NARROW) else ["dim_mult"]
    wrong += [] if 1 <= config["num_res_blocks"] <= _BLOCKS else ["num_res_blocks"]
    if wrong:
        listed = some(f"{name} = {config[name]}" for name in wrong)
        raise CheckpointError(f"{about}: ComfyUI's VAE cannot have {listed}")
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {folder}")
    found, wanted = scan(file, [file]), _shapes(config)
    for text, keys in (
        ("lacks", [key for key in wanted if key not in found]),
        ("holds unknown", [key for key in found if key not in wanted]),
        ("holds misshapen", [k for k in wanted if k in found and found[k].shape != wanted[k]]),
    ):
        if keys:
            raise CheckpointError(f"{file} {text} {len(keys)} tensors: {some(keys)}")
    return comfyui_vae(load_file(file), config)


def _find_transformer(folder: Path) -> Path:
    """The one file of the transformer, or CheckpointError or FileNotFoundError."""
    files, config = locate(folder)
    check(folder, expected_shapes(config), scan(folder, files))
    if len(files) > 1:
        raise CheckpointError(f"{folder} is in {len(files)} files; ComfyUI takes one")
    return files[0]


def export(folder: Path, out: Path, name: str = NAME, overwrite: bool = False) -> list[Path]:
    """Write both files, and return where they are.

    Parameters
    ----------
    folder
        A diffusers folder of the pipeline.
    out
        ComfyUI's folder ``models``, or any other; what is missing of it is made.
    name
        Of both files, without an ending.
    overwrite
        Whether to replace files that are there.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If the folder does not hold such a model. Nothing has been written then.
    FileExistsError
        If a file is there already.
    """
    made = [out / part / f"{name}.safetensors" for part in ("diffusion_models", "vae")]
    there = [path for path in made if path.exists()]
    if there and not overwrite:
        raise FileExistsError(f"{there[0]} is there already; --overwrite replaces it")
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    transformer, vae = _find_transformer(folder / "transformer"), _read_vae(folder / "vae")
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(transformer, made[0])
    # In float32: the rescaled values are no 16-bit numbers any more.
    save_file({key: value.contiguous() for key, value in vae.items()}, made[1])
    return made


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.tiny.export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="diffusers folder of the small model")
    parser.add_argument("out", type=Path, help="ComfyUI's folder models, or any other")
    parser.add_argument("--name", default=NAME, help="of both files (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    args = parser.parse_args(argv)
    try:
        made = export(args.folder.expanduser(), args.out.expanduser(), args.name, args.overwrite)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
