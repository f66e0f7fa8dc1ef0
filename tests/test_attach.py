"""Attaching and detaching: what becomes of the model, and of calls that make no sense."""

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from helpers import (
    TEXT,
)

from graph_cache import GraphCache
from graph_cache.workload import Workload

STEPS = 6


def test_detach_leaves_the_model_exactly_as_found(model):
    before = dict(vars(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cache = GraphCache.attach(model)
    Workload(model, [TEXT]).run(3)
    cache.detach()
    cache.detach()
    assert vars(model) == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_detach_leaves_other_peoples_hooks(model):
    registry = HookRegistry.check_if_exists_or_initialize(model)
    fired = []

    class Noting(ModelHook):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def pre_forward(self, module, *args, **kwargs):
            fired.append(self.name)
            return args, kwargs

    registry.register_hook(Noting("before"), "before")
    cache = GraphCache.attach(model)
    registry.register_hook(Noting("after"), "after")
    cache.detach()
    Workload(model, [TEXT]).run(1)
    assert fired == ["after", "before"]
    # Ours could not be taken out from between them; it lets calls through, and can be used again.
    again = GraphCache.attach(model)
    Workload(model, [TEXT]).run(1)
    assert again.report().calls == 1
    again.detach()


def test_detach_leaves_a_forward_that_was_patched_afterwards(model):
    from accelerate.hooks import ModelHook as AccelerateHook
    from accelerate.hooks import add_hook_to_module

    fired = []

    class Noting(AccelerateHook):
        def pre_forward(self, module, *args, **kwargs):
            fired.append(1)
            return args, kwargs

    cache = GraphCache.attach(model)
    add_hook_to_module(model, Noting())
    cache.detach()
    Workload(model, [TEXT]).run(2)
    assert len(fired) == 2


def test_two_caches_on_one_model_are_refused(model, attach):
    cache = attach(model)
    with pytest.raises(ValueError, match="attached to this model already"):
        GraphCache.attach(model)
    Workload(model, [TEXT]).run(3)
    assert cache.report().calls == 3


def test_it_detaches_as_a_context_manager(model):
    before = dict(vars(model))
    with GraphCache.attach(model) as cache:
        Workload(model, [TEXT]).run(3)
        assert cache.nbytes > 0
    assert cache.nbytes == 0
    assert vars(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be"),
        ({"verify": "sometimes"}, "verify must be"),
        ({"max_entries": 0}, "max_entries must be"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"headroom_bytes": -1}, "headroom_bytes must"),
        ({"arrangement": "per_head"}, "arrangement must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(model, options, message):
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        GraphCache.attach(model, **options)
    assert vars(model) == before


def test_something_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"such as pipe.transformer, got str"):
        GraphCache.attach("Qwen/Qwen-Image-2.1")


def test_calls_by_position_are_understood(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    arguments = work.arguments(0, work.latents, 1.0)
    kv_cache = work.kv_caches()[0]
    positional = [
        arguments[name]
        for name in (
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "img_shapes",
            "img_mask",
        )
    ]
    result = model(*positional, kv_cache=kv_cache, kv_cache_mode="extract")
    assert result.sample.shape[1] == TEXT.prefix_tokens + TEXT.target_tokens
    result = model(*positional, kv_cache=kv_cache, kv_cache_mode="cached")
    assert result.sample.shape == work.latents.shape
    assert cache.report().calls == 2


@pytest.mark.parametrize(
    "wrong",
    [{"kv_cache_mode": "extracted"}, {"nonsense": 1}, {"hidden_states": None}, {"img_mask": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_calls_get_the_models_own_error(wrong, model, attach, capturer):
    work = Workload(model, [TEXT])

    def call():
        arguments = work.arguments(0, work.latents, 1.0)
        arguments |= {"kv_cache": work.kv_caches()[0], "kv_cache_mode": "extract"}
        model(**{**arguments, **wrong})

    with pytest.raises((ValueError, TypeError, AttributeError)) as theirs:
        call()
    attach(model, capturer=capturer)
    with pytest.raises(theirs.type) as ours:
        call()
    assert str(ours.value) == str(theirs.value)
