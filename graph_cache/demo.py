"""The demonstration: pictures through `QwenImage21Pipeline`, and what the cache did for them.

``python -m graph_cache.demo``, or ``make demo``. In a checkout a small trained model makes the
prompt's picture and an edit of it, without the cache and in both of its modes. Where that model is
missing, the pipeline's real classes get small random weights; their picture is noise. With a model
of yours it makes the prompt's picture.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
from diffusers import QwenImage21Pipeline
from PIL import Image

from . import GraphCache
from .demo_pipeline import TRAINED, load_pipeline, pick_device
from .demo_sheet import Cell, draw_sheet, largest_difference
from .loading import CheckpointError
from .reasons import Path
from .report import Kind, RunReport
from .tiny import TinyProcessor, UnknownWordError, has_word_list

PROMPT = "two red circles on a blue striped background"
EDIT = "make the red circles green"
EDIT_OF_ANY = "change the background to white"
MODES = ("off", "buffers", "auto")
SIDE_MULTIPLE = 32


@dataclass(frozen=True)
class Made:
    """A picture, the report of its run, and the seconds that it took."""

    image: Image.Image
    report: RunReport
    seconds: float

    @property
    def step_ms(self) -> float | None:
        """Median time of a decode step in ms: on the GPU where there is one; None without any."""
        steps = [step for step in self.report.steps if step.kind is not Kind.PREFILL]
        times = [step.host_ms if step.gpu_ms is None else step.gpu_ms for step in steps]
        return statistics.median(times) if times else None


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
    made.add_argument("--prompt", default=PROMPT, help="what to make, or to do with --image")
    made.add_argument(
        "--image", type=picture, action="append", help="reference picture; may be repeated"
    )
    made.add_argument(
        "--edit",
        help=f"what to do with the picture made; the small trained model does "
        f"{EDIT!r} to the default prompt's picture, {EDIT_OF_ANY!r} to any other; '' for nothing",
    )
    made.add_argument(
        "--steps",
        type=steps,
        help="default 20, with random weights 12, with a model of yours 25",
    )
    made.add_argument("--size", type=side, help="default 256, with a model of yours 1024")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--mode", choices=("auto", "buffers", "off"), help="default auto")
    made.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="make every picture in all three modes and write sheet.png; "
        "done by default with the small trained model, unless a mode is asked for",
    )
    made.add_argument("--out", type=FilePath, default=FilePath("demo"), help="folder to write to")
    return made


def settle(args: argparse.Namespace) -> None:
    """Put in what was not given, as it suits the model."""
    if args.model is None and (TRAINED / "model_index.json").is_file():
        args.model = str(TRAINED)
    small = args.model is None or has_word_list(FilePath(args.model).expanduser())
    trained = small and args.model is not None
    args.steps = args.steps or (20 if trained else 12 if small else 25)
    args.size = args.size or (256 if small else 1024)
    if args.compare is None:
        args.compare = trained and args.mode is None
    args.mode = args.mode or "auto"
    if args.edit is None and trained and not args.image:
        args.edit = EDIT if args.prompt == PROMPT else EDIT_OF_ANY


def main(argv: list[str] | None = None) -> int:
    """Make the pictures, write them with a report, and print the step table; 1 if they differ."""
    made = parser()
    args = made.parse_args(argv)
    device = pick_device()
    try:
        settle(args)
        with_pictures = bool(args.image or args.edit)
        pipe, given = load_pipeline(args.model, args.prompt, with_pictures, device)
        if isinstance(pipe.processor, TinyProcessor):
            # Before anything is made: the edit comes last.
            pipe.processor.encode(f"{args.prompt} {args.edit or ''}")
    except (FileNotFoundError, CheckpointError, UnknownWordError) as error:
        made.error(str(error))
    what = args.model or "small random weights (the picture will be noise)"
    print(f"Qwen-Image-2.1 pipeline, {what}, on {device}")
    modes = MODES if args.compare else (args.mode,)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compare:
        # The first picture of a process warms kernels and allocator up, and would be timed so.
        _make(pipe, args, "off", given, args.image, steps=2)
    pictures = {mode: _make(pipe, args, mode, given, args.image) for mode in modes}
    asked = pictures[args.mode]
    asked.image.save(args.out / "image.png")
    (args.out / "report.json").write_text(asked.report.to_json() + "\n")
    written = ["image.png", "report.json"]
    print(f"prompt: {args.prompt}")
    print(
        f"{args.size} x {args.size} pixels in {asked.seconds:.2f} s, "
        f"mode reached: {asked.report.path.value}\n"
    )
    print(asked.report.table())
    rows = {args.prompt: pictures}
    if args.edit:
        # Of one picture in all modes, so that each of them is asked the same.
        instruction, before = {"prompt": args.edit}, [pictures[modes[0]].image]
        edits = {mode: _make(pipe, args, mode, instruction, before) for mode in modes}
        edits[args.mode].image.save(args.out / "edit.png")
        written.append("edit.png")
        print(f"\nedit: {args.edit}, in {edits[args.mode].seconds:.2f} s")
        rows[f"then: {args.edit}"] = edits
    differ = False
    if args.compare:
        differ = _compare(rows, args.out / "sheet.png")
        written.append("sheet.png")
    print(f"\nwritten: {', '.join(str(args.out / name) for name in written)}")
    return int(differ)


def _make(
    pipe: QwenImage21Pipeline,
    args: argparse.Namespace,
    mode: str,
    given: dict,
    references: list[Image.Image] | None,
    *,
    steps: int | None = None,
) -> Made:
    """One picture in one mode; in the steps asked for, if none are given."""
    pipe.set_progress_bar_config(desc=mode, leave=False)
    with _quiet(), GraphCache.attach(pipe.transformer, mode=mode) as cache:
        start = time.perf_counter()
        image = pipe(
            **given,
            image=references,
            height=args.size,
            width=args.size,
            output_resolution=args.size,
            num_inference_steps=steps or args.steps,
            generator=torch.Generator().manual_seed(args.seed),
        ).images[0]
        seconds = time.perf_counter() - start
        # A copy: what is held is counted again when the cache gives it back.
        return Made(image, copy.copy(cache.report()), seconds)


def _compare(rows: dict[str, dict[str, Made]], path: FilePath) -> bool:
    """Print and draw every picture beside the one made without the cache; whether any differs."""
    print("\nthe same without the cache and with it: ms a step, largest difference of a pixel")
    shown, largest = [], 0
    for title, pictures in rows.items():
        print(f"  {title}")
        cells = []
        for mode, made in pictures.items():
            difference = largest_difference(made.image, pictures["off"].image)
            largest = max(largest, difference)
            name = _column(mode, made.report)
            step = "no step after the first" if made.step_ms is None else f"{made.step_ms:.1f} ms"
            print(f"    {name:<24}{step:>12}{difference:>6}")
            lines = (f"{name}: {step} a step", f"largest difference from stock: {difference}")
            cells.append(Cell(made.image, lines))
        shown.append((title, cells))
    draw_sheet(shown, path)
    if largest:
        print("The pictures are to be equal and are not: please report this.")
    return largest > 0


def _column(mode: str, report: RunReport) -> str:
    """What a mode turned out to be: where it is no graph, why not."""
    if mode == "off":
        return "stock"
    if mode == "buffers" or report.path is Path.GRAPH:
        return report.path.value
    code = next((code for code, why in report.fallbacks.items() if code != "warm_up"), "no steps")
    return f"{code.replace('_', ' ').replace('cuda', 'CUDA')}: {report.path.value}"


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
