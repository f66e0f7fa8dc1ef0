"""Real CUDA graphs of the native model in ComfyUI's samplers: the same latents, bit for bit."""

import pytest
import torch
from helpers import counters_add_up

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def bench(kind, request):
    from workbench import Workbench

    return Workbench(kind, request.param)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("references", [0, 1, 3])
def test_replayed_steps(bench, references, cfg, batch):
    from workbench import prompt

    job = {
        "positive": prompt(1, references=references),
        "negative": prompt(2, tokens=5, references=references),
        "cfg": cfg,
        "batch": batch,
        "size": (16, 16),
        "steps": 8,
    }
    theirs = bench.sample(**job)
    ours, _ = bench.patch()
    assert torch.equal(bench.sample(ours, **job), theirs)
    conditionings = 1 if cfg == 1.0 else 2
    assert bench.report.counts["replayed"] == 5 * conditionings
    assert bench.report.verified == {"body": True, "replay": True}
    assert counters_add_up(bench.report, 8, conditionings)


def test_runs_that_alternate(bench):
    from workbench import prompt

    ours, runtime = bench.patch(keep_between_runs=True)
    jobs = [
        {"positive": prompt(1)},
        {"positive": prompt(3)},
        {"positive": prompt(1), "size": (8, 12)},
        {"positive": prompt(2, references=2), "cfg": 2.0},
        {"positive": prompt(1), "seed": 5},
    ]
    expected = [bench.sample(steps=6, **job) for job in jobs]
    for _ in range(2):
        for job, theirs in zip(jobs, expected):
            assert torch.equal(bench.sample(ours, steps=6, **job), theirs)
            # What is freed in between must not be what a graph reads.
            junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
            del junk
    assert runtime._cache.nbytes > 0


def test_all_memory_comes_back(bench):
    from workbench import prompt

    ours, _ = bench.patch()
    job = {"positive": prompt(1, references=1), "size": (16, 16), "steps": 5}
    bench.sample(ours, **job)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    bench.sample(ours, **job)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
