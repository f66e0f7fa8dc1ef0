"""Run two engines over the same held-out prompts and edits, and tell how their pictures differ.

    python -m examples.tiny.yardstick --model examples/tiny/model --a off --b buffers

Both get the same seeds. The table says what share of their pictures the checker finds right, and
how near b's are to a's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from tqdm import tqdm

from graph_cache import GraphCache
from graph_cache.demo_pipeline import load_small, pick_device
from graph_cache.loading import CheckpointError

from .checker import Verdict, summary
from .evaluation import Task, tasks
from .fidelity import Fidelity, fidelity, spread
from .scenes import SIDE


@dataclass(frozen=True)
class Engine:
    """A way to run the pipeline.

    Parameters
    ----------
    what
        For the help.
    attach
        Options of `GraphCache.attach`; None: nothing is attached.
    call
        Options of the pipeline's call.
    """

    what: str
    attach: Mapping[str, object] | None = None
    call: Mapping[str, object] = field(default_factory=dict)


ENGINES: dict[str, Engine] = {
    "stock": Engine("the pipeline as it comes; its K/V cache is on by default"),
    "kv": Engine("the pipeline with its own K/V cache", call={"use_kv_cache": True}),
    "whole": Engine(
        "the pipeline without it, every token in every step", call={"use_kv_cache": False}
    ),
    "off": Engine("GraphCache, mode off", {"mode": "off"}),
    "buffers": Engine("GraphCache, mode buffers", {"mode": "buffers"}),
    "auto": Engine("GraphCache, mode auto: CUDA graphs where there can be", {"mode": "auto"}),
}
SORTS = ("prompts", "edits", "combinations")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Result:
    """What two engines made of tasks of one sort.

    Parameters
    ----------
    verdicts
        Of the checker, by "a" and "b".
    nearness
        Of b's pictures to a's.
    paths
        The best path of each run of an engine that is attached, counted; by "a" and "b".
    """

    verdicts: Mapping[str, Sequence[Verdict]]
    nearness: Sequence[Fidelity]
    paths: Mapping[str, Mapping[str, int]]

    def to_dict(self) -> dict:
        """Figures for JSON; an infinite PSNR is only counted."""
        a, b = self.verdicts["a"], self.verdicts["b"]
        return {
            "count": len(a),
            "a": summary(a),
            "b": summary(b),
            "judged_otherwise": sum(one.all != other.all for one, other in zip(a, b)),
            "equal": sum(one.equal for one in self.nearness),
            "psnr": spread(one.psnr for one in self.nearness),
            "ssim": spread(one.ssim for one in self.nearness),
            "alpha_psnr": spread(one.alpha_psnr for one in self.nearness),
            "paths": self.paths,
        }


def run_engine(
    pipe: QwenImage21Pipeline, engine: Engine, asked: Sequence[Task], steps: int, bar: tqdm
) -> tuple[list[np.ndarray], Counter[str]]:
    """Pictures of tasks, uint8 ``(256, 256, 4)`` each, and the paths that their runs reached.

    The seed of a task is its place.
    """
    made, paths = [], Counter()
    attached = nullcontext()
    if engine.attach is not None:
        attached = GraphCache.attach(pipe.transformer, **engine.attach)
    with attached as cache:
        for seed, task in enumerate(asked):
            image = pipe(
                task.prompt,
                image=[Image.fromarray(picture) for picture in task.references] or None,
                height=SIDE,
                width=SIDE,
                output_resolution=SIDE,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
                **engine.call,
            ).images[0]
            made.append(np.asarray(image.convert("RGBA")))
            if cache is not None:
                paths[cache.report().path.value] += 1
            bar.update()
    return made, paths


def compare(
    pipe: QwenImage21Pipeline,
    engines: Mapping[str, Engine],
    asked: Sequence[Task],
    steps: int,
    bar: tqdm,
) -> Result:
    """Run engines "a" and "b" over tasks."""
    pictures, paths = {}, {}
    for key, engine in engines.items():
        pictures[key], paths[key] = run_engine(pipe, engine, asked, steps, bar)
    verdicts = {
        key: [task.judge(picture) for task, picture in zip(asked, made)]
        for key, made in pictures.items()
    }
    return Result(verdicts, [fidelity(a, b) for a, b in zip(pictures["a"], pictures["b"])], paths)


def table(a: str, b: str, results: Mapping[str, Mapping]) -> str:
    """The figures of each sort as a Markdown table.

    Parameters
    ----------
    a, b
        Names of the engines.
    results
        `Result.to_dict` by sort.
    """
    rows: dict[str, list[str]] = {"pictures": [str(each["count"]) for each in results.values()]}
    for key, name in {"a": a, "b": b}.items():
        rows[f"right, {name}"] = [f"{100 * each[key]['all']:.1f} %" for each in results.values()]
    rows["judged otherwise"] = [str(each["judged_otherwise"]) for each in results.values()]
    rows["bitwise equal"] = [str(each["equal"]) for each in results.values()]
    for measure, name, digits in (
        ("psnr", "PSNR, dB: mean, minimum", 1),
        ("ssim", "SSIM: mean, minimum", 4),
        ("alpha_psnr", "PSNR of alpha, dB: mean, minimum", 1),
    ):
        rows[name] = [_shown(each[measure], digits) for each in results.values()]
    lines = [f"| {b} against {a} | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()]
    return "\n".join(lines)


def _shown(figures: Mapping[str, float | int | None], digits: int) -> str:
    if figures["mean"] is None:
        return "all equal"
    text = f"{figures['mean']:.{digits}f}, {figures['minimum']:.{digits}f}"
    return f"{text} ({figures['infinite']} equal)" if figures["infinite"] else text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m examples.tiny.yardstick",
        description=__doc__,
        epilog="engines: " + "; ".join(f"{name}: {e.what}" for name, e in ENGINES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", required=True, help="folder of the small trained model")
    made.add_argument("--a", choices=ENGINES, default="off", help="what b is compared with")
    made.add_argument("--b", choices=ENGINES, default="buffers")
    made.add_argument("--sort", choices=(*SORTS, "all"), default="all")
    made.add_argument("--count", type=_positive, default=200, help="tasks of each sort")
    made.add_argument("--steps", type=_positive, default=20)
    made.add_argument("--seed", type=int, default=1, help="of the tasks")
    made.add_argument("--dtype", choices=_DTYPES, default="fp32")
    made.add_argument("--out", type=Path, help="JSON file for the figures")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Print the table, and write the figures."""
    made = parser()
    args = made.parse_args(argv)
    device = pick_device()
    try:
        pipe = load_small(args.model, device, _DTYPES[args.dtype])
    except (FileNotFoundError, CheckpointError) as error:
        made.error(str(error))
    pipe.set_progress_bar_config(disable=True)
    sorts = SORTS if args.sort == "all" else (args.sort,)
    engines = {"a": ENGINES[args.a], "b": ENGINES[args.b]}
    results = {}
    with tqdm(total=2 * args.count * len(sorts), unit="picture", mininterval=1) as bar:
        for sort in sorts:
            bar.set_description(sort)
            asked = tasks(sort, args.count, args.seed)
            results[sort] = compare(pipe, engines, asked, args.steps, bar).to_dict()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    figures = {
        "command": "python -m examples.tiny.yardstick " + " ".join(argv or sys.argv[1:]),
        "device": gpu or str(device),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "steps": args.steps,
        "engines": {
            key: {"name": name, **asdict(ENGINES[name])}
            for key, name in (("a", args.a), ("b", args.b))
        },
        "sorts": results,
    }
    print(table(args.a, args.b, results))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"\nwritten: {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
