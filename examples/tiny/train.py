"""Train the small Qwen-Image-2.1: first its VAE, then its transformer and word embedding.

    python -m examples.tiny.train vae --minutes 2
    python -m examples.tiny.train transformer --minutes 8

Each writes to ``--run``: its state after every part of the time (a run that was stopped goes on
with ``--resume``), losses, sample sheets, and the folder ``model`` that the pipeline loads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .train_transformer import train_transformer
from .train_vae import train_vae


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("stage", choices=("vae", "transformer"))
    parser.add_argument("--run", type=Path, default=Path("build/tiny"), help="folder to write to")
    parser.add_argument(
        "--minutes", type=float, default=8, help="of the whole stage but its last judgement"
    )
    parser.add_argument("--pictures", type=int, default=60_000, help="for the VAE")
    parser.add_argument(
        "--crop", type=int, default=256, help="side of what the VAE sees of a picture in a step"
    )
    parser.add_argument("--samples", type=int, default=160_000, help="for the transformer")
    parser.add_argument("--edits", type=float, default=0.5, help="share of edits in them")
    parser.add_argument(
        "--batch", type=int, default=None, help="default 64, transformer 256; on a CPU 8, 32"
    )
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument(
        "--cool", type=float, default=0.35, help="last share of the time, to rate 0"
    )
    parser.add_argument("--judge", type=int, default=100, help="held-out tasks of each sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the elementwise work")
    parser.add_argument("--resume", action="store_true", help="go on from what --run holds")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Train a stage."""
    began = time.perf_counter()
    args = parse()
    args.run.mkdir(parents=True, exist_ok=True)
    if args.stage == "vae":
        train_vae(args)
    else:
        train_transformer(args, began)


if __name__ == "__main__":
    main()
