"""Buffers and (stand-in) replay against diffusers' own cached path: bitwise, every step."""

import numpy as np
import pytest
import torch
from helpers import (
    ONE_REFERENCE,
    ONE_REFERENCE_TURNED,
    SHORTER_TEXT,
    TEXT,
    counters_add_up,
    references,
    same,
)
from PIL import Image

from graph_cache.layout import SequenceLayout
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

STEPS = 5
CASES = {
    "text": ([TEXT], 1),
    "text, batch 3": ([TEXT], 3),
    "one text token": ([SequenceLayout((1,), (), (1, 4, 6))], 1),
    "cfg": ([TEXT, SHORTER_TEXT], 1),
    "cfg, equal lengths": ([TEXT, TEXT], 1),
    "cfg, batch 2": ([TEXT, SHORTER_TEXT], 2),
    **{f"{n} references": ([references(n)], 1) for n in range(1, 11)},
    "2 references, cfg, batch 2": ([references(2), references(2, text=3)], 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_diffusers_cached_step(case, arrangement, dtype, attach, capturer):
    layouts, batch = CASES[case]
    model = tiny_transformer(dtype=dtype)
    work = Workload(model, layouts, batch=batch)
    expected = work.run(STEPS).outputs
    cache = attach(model, arrangement=arrangement, capturer=capturer)
    for picture in range(2):
        assert same(work.run(STEPS).outputs, expected)
        report = cache.report()
        assert counters_add_up(report, STEPS, len(layouts))
        assert report.counts["prefill"] == len(layouts)
        assert report.counts["captured"] == (0 if picture else len(layouts))
        assert report.verified == ({} if picture else {"body": True, "replay": True})
        assert report.conditionings[0].references == len(layouts[0].references)
        assert report.conditionings[0].prefix_tokens == layouts[0].prefix_tokens
    cache.mode = "buffers"
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().eager_reasons == {"mode_buffers": (STEPS - 1) * len(layouts)}


def test_float16_clips_as_the_model_does(attach):
    model = tiny_transformer(dtype=torch.float16)
    # Feed-forward results so large that the residual stream leaves the range of float16.
    for block in model.transformer_blocks:
        block.img_mlp.out.weight.mul_(200_000)
    work = Workload(model, [TEXT])
    expected = work.run(3).outputs
    assert all(torch.isfinite(output).all() for output in expected)
    cache = attach(model, verify="never")
    assert same(work.run(3).outputs, expected)
    assert cache.report().eager_reasons == {"no_cuda": 2}


def test_layers_use_their_own_prefix(attach, model):
    """Distinct K/V a layer: a prefix of layer 0 used everywhere would show."""
    for index, block in enumerate(model.transformer_blocks):
        block.attn.to_k.weight.mul_(1 + index)
        block.attn.to_v.weight.mul_(3 - index)
    work = Workload(model, [references(2)])
    expected = work.run(STEPS).outputs
    cache = attach(model, verify="never")
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().eager_reasons == {"no_cuda": STEPS - 1}


@pytest.mark.parametrize("order", ["ABA", "AABB", "ABAB"])
def test_equal_layouts_with_other_contents_do_not_mix(order, attach, capturer, model):
    works = {name: Workload(model, [TEXT], seed=seed) for seed, name in enumerate("AB")}
    expected = {name: work.run(STEPS).outputs for name, work in works.items()}
    cache = attach(model, capturer=capturer)
    for name in order:
        assert same(works[name].run(STEPS).outputs, expected[name])
    assert len(capturer.steps) == 1, "equal layouts share one capture"
    assert cache.report().counts["replayed"] == STEPS - 1


def test_equal_token_counts_with_other_grids_do_not_mix(attach, capturer, model):
    works = [Workload(model, [layout]) for layout in (ONE_REFERENCE, ONE_REFERENCE_TURNED)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model, capturer=capturer)
    for index in (0, 1, 0):
        assert same(works[index].run(STEPS).outputs, expected[index])
    assert len(capturer.steps) == 2


def test_two_runs_in_turns_own_their_prefixes(attach, capturer, model):
    """Two pipelines over one transformer, step by step in turns, with equal layouts."""
    works = [Workload(model, [TEXT], seed=seed) for seed in range(2)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model, capturer=capturer)
    caches = [work.kv_caches()[0] for work in works]
    latents = [work.latents.clone() for work in works]
    for step in range(STEPS):
        for index, work in enumerate(works):
            arguments = work.arguments(0, latents[index], 1 - step / STEPS)
            mode = "cached" if step else "extract"
            output = model(**arguments, kv_cache=caches[index], kv_cache_mode=mode)[0]
            output = output[:, -work.latents.shape[1] :]
            assert same([output], [expected[index][step]])
            latents[index] -= output / STEPS


def test_a_new_schedule_uses_the_same_graph(attach, capturer, model):
    work = Workload(model, [TEXT])
    expected = {steps: work.run(steps).outputs for steps in (4, 7)}
    attach(model, capturer=capturer)
    for steps in (4, 7, 4):
        assert same(work.run(steps).outputs, expected[steps])
    assert len(capturer.steps) == 1


def test_inference_mode_and_no_grad_in_turns(attach, capturer, model):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    attach(model, capturer=capturer)
    with torch.inference_mode():
        inside = work.run(STEPS).outputs
    assert same(inside, expected)
    assert same(work.run(STEPS).outputs, expected)


# --- the unmodified pipeline ------------------------------------------------------------------


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA")


def generate(pipe, prompt="a red circle", pictures=(), **options):
    """One call of the pipeline: a target of 64 x 96 pixels, references of about 64 x 64."""
    result = pipe(
        prompt,
        image=list(pictures) or None,
        height=96,
        width=64,
        output_resolution=64,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(5),
        **options,
    )
    return [np.asarray(image) for image in result.images]


GUIDED = {"negative_prompt": "blurry, of low quality, with text", "true_cfg_scale": 3.0}
PIPELINE_CASES = {
    "text": {},
    "batch": {"num_images_per_prompt": 2},
    "two prompts": {"prompt": ["a red circle", "a blue square"]},
    "guidance": GUIDED,
    "one reference": {"pictures": [picture((64, 64), 0)]},
    "three references, guidance, batch": {
        "pictures": [picture((64, 64), 0), picture((96, 32), 1), picture((40, 80), 2)],
        "num_images_per_prompt": 2,
        **GUIDED,
    },
}


@pytest.mark.parametrize("case", PIPELINE_CASES)
def test_the_pipeline_gives_the_same_picture(case, pipe, attach, capturer):
    options = PIPELINE_CASES[case]
    expected = generate(pipe, **options)
    cache = attach(pipe.transformer, capturer=capturer)
    for _ in range(2):
        images = generate(pipe, **options)
        assert all(map(np.array_equal, images, expected))
    report = cache.report()
    conditionings = 2 if "negative_prompt" in options else 1
    assert counters_add_up(report, STEPS, conditionings)
    assert report.counts["replayed"] == (STEPS - 1) * conditionings
    assert len(capturer.steps) == conditionings


def test_another_prompt_gives_another_picture(pipe, attach, capturer):
    """The equality tests could not fail if the prompt had no influence."""
    attach(pipe.transformer, capturer=capturer)
    one, two = (generate(pipe, prompt)[0] for prompt in ("a red circle", "a blue circle"))
    assert not np.array_equal(one, two)


def test_another_reference_gives_another_picture(pipe, attach, capturer):
    attach(pipe.transformer, capturer=capturer)
    one, two = (generate(pipe, pictures=[picture((64, 64), seed)])[0] for seed in (0, 1))
    assert not np.array_equal(one, two)


def test_memory_can_be_given_back_before_the_vae_decodes(pipe, attach, capturer):
    expected = generate(pipe)
    cache = attach(pipe.transformer, capturer=capturer)
    held = []
    decode = pipe.vae.decode

    def watched(*args, **kwargs):
        held.append(cache.nbytes)
        return decode(*args, **kwargs)

    pipe.vae.decode = watched
    images = generate(pipe, callback_on_step_end=cache.free_after_last_step)
    assert held == [0]
    assert all(step.released for step in capturer.steps)
    assert np.array_equal(images[0], expected[0])
    assert np.array_equal(generate(pipe)[0], expected[0])
    assert held[1] > 0
