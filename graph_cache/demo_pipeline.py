"""The pipeline that a command runs: of a folder, or small with random weights."""

from __future__ import annotations

from pathlib import Path as FilePath

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
)
from transformers import Qwen3VLForConditionalGeneration

from .loading import CheckpointError, load_transformer, read_json
from .tiny import TinyProcessor, has_word_list, tiny_pipeline

TRAINED = FilePath(__file__).parents[1] / "examples" / "tiny" / "model"
"""The small trained model of a checkout; an installed package comes without it."""


def pick_device() -> torch.device:
    """An NVIDIA or AMD GPU if torch sees one, the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_pipeline(
    model: str | FilePath | None, prompt: str, with_pictures: bool, device: torch.device
) -> tuple[QwenImage21Pipeline, dict]:
    """The pipeline of a model folder, or the small one, and the arguments that carry the prompt.

    Parameters
    ----------
    model
        A diffusers folder of Qwen-Image-2.1; None for small random weights.
    prompt
        What to make.
    with_pictures
        Whether there are reference pictures. Without any, the text encoder is done and gone before
        the transformer is loaded, so the GPU never has to hold both.
    device
        Where it runs.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If the folder does not hold the pipeline.
    """
    if model is None:
        return tiny_pipeline(device=device, dtype=_dtype(device)), {"prompt": prompt}
    folder = FilePath(model).expanduser()
    _check(folder)
    if has_word_list(folder):
        return load_small(folder, device), {"prompt": prompt}
    dtype = _dtype(device)
    pipe = QwenImage21Pipeline.from_pretrained(
        folder, transformer=None, dtype=dtype, local_files_only=True
    )
    given = {"prompt": prompt}
    if not with_pictures:
        pipe.text_encoder.to(device)
        with torch.no_grad():
            embeds, mask, _ = pipe.encode_prompt(prompt, device=device)
        given = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
        pipe.register_modules(text_encoder=None)
    pipe.register_modules(transformer=load_transformer(folder, device=device, dtype=dtype))
    return pipe.to(device), given


def load_small(
    folder: str | FilePath,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> QwenImage21Pipeline:
    """The unmodified pipeline of a folder whose tokenizer is a list of words.

    The real processor needs torchvision, and `from_pretrained` takes no other in its place. So the
    components are loaded one by one, and the processor is `TinyProcessor`, which does the same to
    the same words and names those that it does not know.

    Parameters
    ----------
    folder
        With a file ``model_index.json``.
    device
        Where it runs.
    dtype
        Of all weights. A model that small gains nothing from 16 bits, and its flat areas would
        show the VAE's bfloat16.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If the folder does not hold such a pipeline.
    """
    folder = FilePath(folder).expanduser()
    _check(folder)
    processor = TinyProcessor.from_folder(folder)
    transformer = load_transformer(folder, device=device, dtype=dtype, progress=False)
    missing = [name for name in ("vae", "text_encoder") if not (folder / name).is_dir()]
    if missing:
        raise FileNotFoundError(f"no {missing[0]} in {folder}")
    local = {"local_files_only": True}
    pipe = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler", **local),
        vae=AutoencoderKLQwenImage21.from_pretrained(
            # Said, so that diffusers does not recommend accelerate for 3 MB.
            folder / "vae",
            dtype=dtype,
            low_cpu_mem_usage=False,
            **local,
        ),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(
            folder / "text_encoder", dtype=dtype, **local
        ),
        processor=processor,
        transformer=transformer,
    )
    return pipe.to(device)


def _check(folder: FilePath) -> None:
    """Raise FileNotFoundError or CheckpointError if a folder is not of this pipeline."""
    if not folder.exists():
        raise FileNotFoundError(f"there is nothing at {folder}")
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(f"{folder} is no diffusers pipeline: it has no model_index.json")
    name = read_json(folder / "model_index.json").get("_class_name")
    if name != "QwenImage21Pipeline":
        raise CheckpointError(f"{folder / 'model_index.json'} is of a {name}, not of this pipeline")
