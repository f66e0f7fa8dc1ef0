"""How exact a step is: each way to compute it against the same step in float32.

``python -m graph_cache.quality --help``. The stock step rounds too: whatever is not bit-equal to it
should be about as near to float32 as it is, and no further from it than its own attention kernels
are from each other.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import NamedTuple

import torch
from diffusers import QwenImage21Transformer2DModel

from . import GraphCache
from .bench import add_model_options, build_model, machine, parse_case
from .capture import relative_difference
from .workload import Case, Workload

LEVELS = (0.9375, 0.6875, 0.40625, 0.1015625)
"""Noise levels at which a single decode step is compared. bfloat16 holds them exactly: a level that
it rounds would be another step, and nothing of it the kernels' doing."""
ALLOWED = 1.1
"""Most that the fast step's distance to float32 may be, in distances of the stock step."""


class Way(NamedTuple):
    """A way to compute a step: a profile of the cache (None: without it), an attention backend."""

    profile: str | None = None
    attention: str = "native"


WAYS = {
    "stock": Way(),
    "stock, other attention": Way(attention="_native_math"),
    "exact": Way("exact"),
    "fast": Way("fast"),
}


@dataclass
class Row:
    """A way on one case.

    Attributes
    ----------
    to_float32
        Mean over noise levels of the relative difference of one decode step to the same step of
        the model in float32, prefix included: the norm of the difference over the norm of that.
    over_stock
        `to_float32` over that of the stock step.
    to_stock
        Relative difference of the latents after a whole run to those of the stock path.
    kernels
        What ran each operation of a fast step.
    """

    case: str
    way: str
    to_float32: float
    over_stock: float
    to_stock: float
    kernels: dict[str, str]


def measure(model: QwenImage21Transformer2DModel, case: Case, steps: int) -> list[Row]:
    """Every way on one case.

    Parameters
    ----------
    model
        In the dtype to be judged.
    case
        What is generated, from random latents and prompts.
    steps
        Of the whole run.
    """
    work = Workload(model, case.layouts(), batch=case.batch)
    expected = _float32_steps(work)
    made, runs, kernels = {}, {}, {}
    for name, way in WAYS.items():
        with _in_the_way(model, way) as cache:
            made[name] = single_steps(work)
            kernels[name] = {} if cache is None else cache.report().kernels
            runs[name] = work.latents - sum(work.run(steps).outputs[:: case.conditionings]) / steps
    rows = []
    for name in WAYS:
        errors = [relative_difference(a, b) for a, b in zip(made[name], expected)]
        stock = [relative_difference(a, b) for a, b in zip(made["stock"], expected)]
        rows.append(
            Row(
                case.name,
                name,
                sum(errors) / len(errors),
                sum(errors) / max(sum(stock), torch.finfo(torch.float32).tiny),
                relative_difference(runs[name], runs["stock"]),
                kernels[name],
            )
        )
    return rows


@contextmanager
def _in_the_way(model: QwenImage21Transformer2DModel, way: Way) -> Iterator[GraphCache | None]:
    model.set_attention_backend(way.attention)
    try:
        if way.profile is None:
            yield None
        else:
            options = {"profile": way.profile, "verify": "never", "headroom_bytes": 0}
            with GraphCache.attach(model, **options) as cache:
                yield cache
    finally:
        model.reset_attention_backend()


def single_steps(work: Workload) -> list[torch.Tensor]:
    """One decode step at each of `LEVELS`, from the same latents, of the first conditioning."""
    (kv_cache, *_) = work.kv_caches()
    found = []
    for index, level in enumerate((1.0, *LEVELS)):
        arguments = work.arguments(0, work.latents, level)
        mode = "cached" if index else "extract"
        output = work.model(**arguments, kv_cache=kv_cache, kv_cache_mode=mode)[0]
        found.append(output[:, -work.latents.shape[1] :])
    return found[1:]


def _float32_steps(work: Workload) -> list[torch.Tensor]:
    """`single_steps` of the same weights, latents, prompts and references in float32."""
    exact = copy.copy(work)
    exact.model = copy.deepcopy(work.model).float()
    exact.dtype = torch.float32
    exact.latents, exact.references = work.latents.float(), work.references.float()
    exact.prompts = [prompt.float() for prompt in work.prompts]
    return single_steps(exact)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("case", "way", "to float32", "x stock", "run to stock")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.case, row.way, f"{row.to_float32:.3e}", f"{row.over_stock:.3f}"]
        cells.append(f"{row.to_stock:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m graph_cache.quality", description=__doc__)
    made.add_argument("--cases", type=parse_case, nargs="+", metavar="SIZE[:REFS[:BATCH[:CONDS]]]")
    made.add_argument("--steps", type=int, default=8, help="of the whole run (default 8)")
    made.add_argument("--json", type=FilePath, help="also write the rows to this file")
    add_model_options(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure; fails where the fast step is further from float32 than allowed."""
    args = parser().parse_args(argv)
    args.dtype = args.dtype or "bf16"
    cases = args.cases or [Case(128), Case(128, references=1)]
    where = machine("quality", argv if argv is not None else sys.argv[1:])
    print(json.dumps(where), flush=True)
    model = build_model(args)
    rows: list[Row] = []
    with torch.no_grad():
        for case in cases:
            rows += measure(model, case, args.steps)
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
    print(table(rows))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": where, "dtype": args.dtype, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1))
    far = [row for row in rows if row.way == "fast" and not row.over_stock <= ALLOWED]
    for row in far:
        print(f"{row.case}: the fast step is {row.over_stock:.2f} times as far from float32")
    return 1 if far else 0


if __name__ == "__main__":
    raise SystemExit(main())
