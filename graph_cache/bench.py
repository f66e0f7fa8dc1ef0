"""Benchmark: diffusers without and with its K/V cache against prefix buffers and graph replay.

``python -m graph_cache.bench --help``. One process, one table, and a JSON file for those who want
to compute with it. Every row says whether its steps equal those of diffusers' cached path, and
how far they are from them; only the fast profile's may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath

import diffusers
import torch
from diffusers import QwenImage21Transformer2DModel

from . import GraphCache
from .bench_report import write_report
from .capture import bitwise_equal, relative_difference
from .ceiling import ceiling_ms
from .loading import load_transformer
from .tiny import random_weights, tiny_transformer
from .workload import Case, Workload

ENGINES = (
    "diffusers",
    "diffusers use_kv_cache",
    "buffers",
    "graph",
    "graph, shared",
    "graph, per layer",
    "fast",
)
_ARRANGEMENTS = {"graph, shared": "shared", "graph, per layer": "per_layer"}
_MAY_DIFFER = (ENGINES[0], "fast")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Row:
    """One engine on one case; times in ms a denoiser call after the first step.

    Attributes
    ----------
    case, size, references, batch, conditionings
        See `graph_cache.workload.Case`.
    engine
        One of `ENGINES`.
    gpu_ms
        Median time between a call's first and last work on the GPU's stream.
    host_ms
        Median time until the call returned to Python, with nothing queued on the GPU before it.
    wall_ms
        Time of the whole decode loop over its calls: what a user waits for.
    busy
        GPU time of the replayed graph over this engine's wall time: how much of the step the GPU
        had work for. None where there is no graph.
    ratio
        Wall time of diffusers' cached step over this one's.
    ceiling_ms
        Time of the step's matrix products and attention alone, see `graph_cache.ceiling`; None
        where it was not measured.
    equal
        Whether every step of every conditioning equals diffusers' cached path bitwise.
    first_ms
        Time of the first step, which prefills.
    difference
        The largest relative difference of a step to diffusers' cached one: the norm of the
        difference over the norm of the latter. It grows from step to step, as latents part. None
        where it is no number.
    kernels
        What ran each operation of a fast step.
    """

    case: str
    size: int
    references: int
    batch: int
    conditionings: int
    engine: str
    gpu_ms: float | None
    host_ms: float
    wall_ms: float
    first_ms: float
    equal: bool
    difference: float | None = None
    busy: float | None = None
    ratio: float | None = None
    ceiling_ms: float | None = None
    peak_mib: int | None = None
    held_mib: int = 0
    graph_mib: int = 0
    captures: int = 0
    capture_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    verified: dict[str, bool] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)


def bench_case(
    model: QwenImage21Transformer2DModel, case: Case, steps: int, engines: tuple[str, ...]
) -> list[Row]:
    """Every engine on one case.

    A first, untimed run of each engine warms kernels, allocator and graphs up; the timed one is
    the second picture of a session: same size, same prompt length, another prompt.
    """
    warm, work = (Workload(model, case.layouts(), batch=case.batch, seed=seed) for seed in (1, 2))
    expected: list[torch.Tensor] = []
    rows: list[Row] = []
    # The reference first, whatever was asked for: all others are compared with it.
    for engine in sorted({*engines, ENGINES[1]}, key=lambda name: name != ENGINES[1]):
        rows.append(_bench_engine(engine, case, steps, warm, work, expected))
    replay = next((row.gpu_ms for row in rows if row.counts.get("replayed")), None)
    for row in rows:
        row.ratio = rows[0].wall_ms / row.wall_ms
        if replay is not None:
            row.busy = min(1.0, replay / row.wall_ms)
    rows.sort(key=lambda row: ENGINES.index(row.engine))
    return [row for row in rows if row.engine in engines]


def _bench_engine(
    engine: str,
    case: Case,
    steps: int,
    warm: Workload,
    work: Workload,
    expected: list[torch.Tensor],
) -> Row:
    model, device = work.model, work.device
    cached = engine != ENGINES[0]
    cache = None
    if engine not in ENGINES[:2]:
        cache = GraphCache.attach(
            model,
            mode="buffers" if engine == "buffers" else "auto",
            arrangement=_ARRANGEMENTS.get(engine, "auto"),
            verify="always",
            profile="fast" if engine == "fast" else "exact",
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        first_report = None
        warm.run(steps, cached=cached)
        if cache is not None:
            first_report = cache.report().to_dict()
            # Checked in the warm-up; a comparison in the timed run would be timed too.
            cache.verify = "never"
        timings = work.run(steps, cached=cached)
        report = cache.report() if cache is not None else None
        drained = work.run(steps, cached=cached, drain=True)
        row = Row(
            case=case.name,
            size=case.size,
            references=case.references,
            batch=case.batch,
            conditionings=case.conditionings,
            engine=engine,
            gpu_ms=timings.gpu_ms(),
            host_ms=drained.host_ms(),
            wall_ms=timings.wall_ms(),
            first_ms=timings.first * 1e3,
            equal=True,
        )
        if device.type == "cuda":
            row.peak_mib = torch.cuda.max_memory_allocated(device) >> 20
        if report is not None:
            row.held_mib = report.buffer_bytes >> 20
            row.graph_mib = report.graph_bytes >> 20
            row.captures = report.captures
            row.capture_s = first_report["capture_seconds"]
            row.counts = report.counts
            row.reasons = [code for code, why in report.fallbacks.items() if code != "warm_up"]
            row.verified = first_report["verified"]
            row.kernels = report.kernels
    finally:
        if cache is not None:
            cache.detach()
    if engine == ENGINES[1]:
        expected[:] = timings.outputs
    pairs = list(zip(timings.outputs, expected))
    row.equal = all(bitwise_equal(a, b) for a, b in pairs)
    away = [relative_difference(a, b) for a, b in pairs]
    row.difference = max(away) if all(map(math.isfinite, away)) else None
    return row


def machine(command: str = "bench", arguments: list[str] | None = None) -> dict:
    """What the figures belong to, and the command that made them."""
    arguments = sys.argv[1:] if arguments is None else arguments
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "allocator": torch.cuda.get_allocator_backend() if gpu else None,
        "diffusers": diffusers.__version__,
        "command": " ".join(["python -m graph_cache." + command, *arguments]),
    }


def _shown(row: Row) -> str:
    """The engine's name, and that it had no graph where it had none."""
    asked = row.engine.startswith(("graph", "fast"))
    return row.engine if row.counts.get("replayed") or not asked else f"{row.engine} (none here)"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("case", "engine", "GPU ms", "host ms", "wall ms", "GPU busy", "x use_kv_cache")
    head += (
        "x ceiling",
        "bitwise equal",
        "difference",
        "capture s",
        "held MiB",
        "graph MiB",
        "peak MiB",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [
            row.case,
            _shown(row),
            "-" if row.gpu_ms is None else f"{row.gpu_ms:.2f}",
            f"{row.host_ms:.2f}",
            f"{row.wall_ms:.2f}",
            "-" if row.busy is None else f"{row.busy:.0%}",
            f"{row.ratio:.3f}",
            "-" if row.ceiling_ms is None else f"{row.wall_ms / row.ceiling_ms:.2f}",
            "yes" if row.equal else "no" if row.engine in _MAY_DIFFER else "NO",
            "not a number" if row.difference is None else f"{row.difference:.1e}",
            f"{row.capture_s:.3f}" if row.captures or row.capture_s else "-",
            str(row.held_mib),
            str(row.graph_mib),
            "-" if row.peak_mib is None else str(row.peak_mib),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def build_model(args: argparse.Namespace) -> QwenImage21Transformer2DModel:
    """The transformer that the options ask for."""
    device, dtype = torch.device(args.device), _DTYPES[args.dtype]
    if args.model is not None:
        return load_transformer(args.model, device=device, dtype=dtype)
    if not args.random_weights:
        return tiny_transformer(dtype=dtype, device=device)
    # Made on the device and in the dtype wanted: 7.1 B parameters in float32 would be 28 GB.
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = QwenImage21Transformer2DModel()
    finally:
        torch.set_default_dtype(default)
    random_weights(model, 0)
    return model.eval().requires_grad_(False)


def parse_case(text: str) -> Case:
    """A case from ``SIZE[:REFERENCES[:BATCH[:CONDITIONINGS]]]``."""
    try:
        case = Case(*(int(part) for part in text.split(":")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE[:REFS[:BATCH[:CONDS]]]") from None
    if case.size < 32 or case.size % 32:
        raise argparse.ArgumentTypeError(f"size {case.size} is not a multiple of 32")
    if case.references not in range(11) or case.batch < 1 or case.conditionings not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r}: 0-10 references, 1+ rows, 1-2 conditionings")
    return case


def add_model_options(made: argparse.ArgumentParser) -> None:
    """Options that `build_model` reads."""
    made.add_argument(
        "--dtype",
        choices=_DTYPES,
        default=None,
        help="default bf16; on a CPU the benchmark takes fp32",
    )
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    weights = made.add_mutually_exclusive_group()
    weights.add_argument("--model", help="folder or .safetensors file with real weights")
    weights.add_argument(
        "--random-weights", action="store_true", help="the true 7 B configuration, random weights"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m graph_cache.bench", description=__doc__)
    made.add_argument(
        "--cases",
        type=parse_case,
        nargs="+",
        default=None,
        metavar="SIZE[:REFS[:BATCH[:CONDS]]]",
        help="what to generate (default: 64 128 on the small model, 512 1024 1024:1 otherwise)",
    )
    made.add_argument(
        "--ceiling",
        action="store_true",
        help="also time the step's matrix products and attention alone",
    )
    made.add_argument(
        "--out", type=FilePath, help="folder for <gpu>.json, a page with the table, and plots"
    )
    made.add_argument("--steps", type=int, default=12, help="denoising steps (default 12)")
    made.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES),
        metavar="ENGINE",
        help=", ".join(f'"{engine}"' for engine in ENGINES),
    )
    add_model_options(made)
    made.add_argument("--json", type=FilePath, help="also write the rows to this file")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    args = parser().parse_args(argv)
    if args.steps < 5:
        # Prefill, warm-up, capture: less leaves nothing to measure.
        parser().error("--steps must be at least 5")
    if args.dtype is None:
        args.dtype = "bf16" if torch.device(args.device).type == "cuda" else "fp32"
    if args.cases is None:
        small = args.model is None and not args.random_weights
        args.cases = [
            parse_case(c) for c in (["64", "128"] if small else ["512", "1024", "1024:1"])
        ]
    where = machine()
    print(json.dumps(where), flush=True)
    model = build_model(args)
    rows: list[Row] = []
    with torch.no_grad():
        for case in args.cases:
            made = bench_case(model, case, args.steps, tuple(args.engines))
            if args.ceiling:
                device, dtype = torch.device(args.device), _DTYPES[args.dtype]
                found = ceiling_ms(model, case.layouts()[0], case.batch, dtype, device)
                for row in made:
                    row.ceiling_ms = found
            rows += made
            print(table(made), flush=True)
            # After every case: a long benchmark that is stopped has not been for nothing.
            head = {"machine": where, "steps": args.steps, "dtype": args.dtype}
            data = {**head, "rows": [asdict(row) for row in rows]}
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(data, indent=1))
            if args.out is not None:
                written = write_report(data, table(rows), args.out)
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
    print()
    print(table(rows))
    if args.out is not None:
        print("written:", *written)
        if not any(path.suffix == ".png" for path in written):
            print("no plots: matplotlib is not installed")
    return 0 if all(row.equal or row.engine in _MAY_DIFFER for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
