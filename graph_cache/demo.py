"""The demonstration: one picture through `QwenImage21Pipeline`, and what the cache did for it.

``python -m graph_cache.demo``, or ``make demo``. Without a model it makes the pipeline's real
classes with small random weights on the spot; their picture is noise. With a model it makes the
prompt's picture.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath

import torch
from diffusers import QwenImage21Pipeline
from PIL import Image

from . import GraphCache
from .loading import CheckpointError, load_transformer, read_json
from .tiny import tiny_pipeline

PROMPT = "two red circles on a blue striped background"
SIDE_MULTIPLE = 32


def pick_device() -> torch.device:
    """An NVIDIA or AMD GPU if torch sees one, the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_pipeline(
    model: str | None, prompt: str, with_pictures: bool, device: torch.device
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
    if not folder.exists():
        raise FileNotFoundError(f"there is nothing at {folder}")
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(f"{folder} is no diffusers pipeline: it has no model_index.json")
    name = read_json(folder / "model_index.json").get("_class_name")
    if name != "QwenImage21Pipeline":
        raise CheckpointError(f"{folder / 'model_index.json'} is of a {name}, not of this pipeline")
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


def side(text: str) -> int:
    """A picture's side for argparse: positive, a multiple of 32."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of pixels") from None
    if value < SIDE_MULTIPLE or value % SIDE_MULTIPLE:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of {SIDE_MULTIPLE}")
    return value


def steps(text: str) -> int:
    """A number of steps for argparse: at least one."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of steps")
    return value


def picture(text: str) -> Image.Image:
    """A reference picture for argparse."""
    try:
        with Image.open(text) as opened:
            return opened.convert("RGBA")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m graph_cache.demo", description=__doc__)
    made.add_argument("--model", help="diffusers folder of Qwen-Image-2.1")
    made.add_argument("--prompt", default=PROMPT)
    made.add_argument(
        "--image", type=picture, action="append", help="reference picture; may be repeated"
    )
    made.add_argument("--steps", type=steps, default=None, help="default 12, with a model 25")
    made.add_argument("--size", type=side, default=None, help="default 256, with a model 1024")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--mode", choices=("auto", "buffers", "off"), default="auto")
    made.add_argument("--out", type=FilePath, default=FilePath("demo"), help="folder to write to")
    return made


def main(argv: list[str] | None = None) -> int:
    """Make a picture, write it with its report, and print the step table."""
    made = parser()
    args = made.parse_args(argv)
    device = pick_device()
    size = args.size or (256 if args.model is None else 1024)
    try:
        pipe, given = load_pipeline(args.model, args.prompt, bool(args.image), device)
    except (FileNotFoundError, CheckpointError) as error:
        made.error(str(error))
    what = args.model or "small random weights (the picture will be noise)"
    print(f"Qwen-Image-2.1 pipeline, {what}, on {device}")
    with _quiet(), GraphCache.attach(pipe.transformer, mode=args.mode) as cache:
        start = time.perf_counter()
        image = pipe(
            **given,
            image=args.image,
            height=size,
            width=size,
            output_resolution=size,
            num_inference_steps=args.steps or (12 if args.model is None else 25),
            generator=torch.Generator().manual_seed(args.seed),
        ).images[0]
        seconds = time.perf_counter() - start
        report = cache.report()
        args.out.mkdir(parents=True, exist_ok=True)
        image.save(args.out / "image.png")
        (args.out / "report.json").write_text(report.to_json() + "\n")
        print(f"prompt: {args.prompt}")
        print(f"{size} x {size} pixels in {seconds:.2f} s, mode reached: {report.path.value}\n")
        print(report.table())
    print(f"\nwritten: {args.out / 'image.png'}, {args.out / 'report.json'}")
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep reasons out of the log: they are part of the printed table."""
    logger = logging.getLogger("graph_cache")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main())
