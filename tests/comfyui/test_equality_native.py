"""Mode buffers and replayed steps against mode off: the same latents, bit for bit."""

import comfy_env
import pytest
import torch
from helpers import FakeCapturer, counters_add_up

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def same_as_off(bench):
    def check(capturer=None, mode="buffers", **job):
        theirs = bench.sample(**job)
        off, _ = bench.patch(mode="off")
        assert torch.equal(bench.sample(off, **job), theirs)
        ours, runtime = bench.patch(mode=mode, capturer=capturer)
        assert torch.equal(bench.sample(ours, **job), theirs)
        assert set(bench.report.verified) >= {"body"}
        assert all(bench.report.verified.values())
        return runtime

    return check


@pytest.mark.parametrize("mask", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("references", [0, 1, 3])
def test_every_kind_of_run(same_as_off, bench, references, cfg, batch, sampler, mask):
    from workbench import prompt

    same_as_off(
        positive=prompt(1, references=references),
        negative=prompt(2, tokens=5, references=references),
        cfg=cfg,
        batch=batch,
        sampler=sampler,
        mask=mask,
    )
    conditionings = 1 if cfg == 1.0 else 2
    assert len(bench.report.conditionings) == conditionings
    counts = bench.report.counts
    assert counts["prefill"] == conditionings
    assert bench.report.eager_reasons == {"mode_buffers": counts["eager"]}


@pytest.mark.parametrize("references", [0, 2])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_replayed_steps(same_as_off, bench, cfg, references):
    from workbench import prompt

    capturer = FakeCapturer()
    same_as_off(
        capturer,
        mode="auto",
        positive=prompt(1, references=references),
        negative=prompt(2, tokens=5, references=references),
        cfg=cfg,
        steps=6,
    )
    conditionings = 1 if cfg == 1.0 else 2
    assert bench.report.counts == {
        "prefill": conditionings,
        "captured": conditionings,
        "replayed": 3 * conditionings,
        "eager": conditionings,
    }
    assert counters_add_up(bench.report, 6, conditionings)
    assert bench.report.path.value == "graph"
    # The keys are compared anew in every run, and nothing is left behind.
    assert all(step.released for step in capturer.steps)


def test_prompts_of_one_length_are_sampled_in_one_batch(same_as_off, bench):
    from workbench import prompt

    same_as_off(positive=prompt(1), negative=prompt(2), cfg=3.0)
    assert [c.batch for c in bench.report.conditionings] == [2]


def test_two_prompts_combined(same_as_off, bench):
    from workbench import prompt

    same_as_off(positive=prompt(1) + prompt(3, tokens=4), cfg=3.0)
    assert len(bench.report.conditionings) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes(kind, dtype):
    from workbench import Workbench, prompt

    bench = Workbench(kind, dtype)
    job = {"positive": prompt(1, references=1), "batch": 2}
    ours, _ = bench.patch(mode="buffers")
    assert torch.equal(bench.sample(ours, **job), bench.sample(**job))
    assert bench.report.path.value == "buffers"


def test_blocks_that_take_their_modulation_in_four_parts():
    comfy_env.load()
    from standin import FourPartModel
    from workbench import Workbench

    bench = Workbench("standin", model_class=FourPartModel)
    ours, _ = bench.patch(mode="buffers")
    assert torch.equal(bench.sample(ours), bench.sample())
    assert bench.report.path.value == "buffers"


@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
def test_both_arrangements(bench, arrangement):
    from workbench import prompt

    job = {"positive": prompt(1, references=3)}
    theirs = bench.sample(**job)
    ours, runtime = bench.patch(mode="buffers", keep_between_runs=True)
    bench.sample(ours, **job)
    runtime.release()
    runtime._cache.limits.arrangement = arrangement
    assert torch.equal(bench.sample(ours, **job), theirs)
    assert bench.report.conditionings[0].arrangement == arrangement


def test_a_wrong_prefix_would_show(bench):
    """The model is not blind to what the cache could get wrong."""
    from workbench import prompt

    first = bench.sample(positive=prompt(1))
    assert not torch.equal(bench.sample(positive=prompt(4)), first)
    job = {"positive": prompt(1, references=1)}
    moved = prompt(1, references=1)
    moved[0][1]["image_slots"] = [4]
    assert not torch.equal(bench.sample(positive=moved), bench.sample(**job))
