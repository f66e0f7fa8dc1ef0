"""Every reason that only ComfyUI can meet, produced by what really causes it.

Each case says what is done to model or run, which path the steps then take, and that the picture
is the one that ComfyUI makes without us. The last test fails if a reason has no case.
"""

import comfy_env
import pytest
import torch
from helpers import FakeCapturer, counters_add_up

from graph_cache import REASONS, Path
from graph_cache.reason_rows_comfyui import ROWS

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5
CASES = {}


def case(*codes):
    """Register a case for a code, and others that come with it; it gets an `Attempt`."""

    def register(prepare):
        CASES.setdefault(codes[0], []).append((prepare, set(codes[1:])))
        return prepare

    return register


class Attempt:
    """A run that something stands against: nodes before ours change `patcher`."""

    def __init__(self, bench, monkeypatch):
        self.bench = bench
        self.monkeypatch = monkeypatch
        self.patcher = bench.patcher.clone()
        self.options = {}
        self.job = {}
        # Whether the run without us goes through the same nodes.
        self.behind = lambda patcher: patcher
        self.calls = None
        self.hidden_from_us = False

    @property
    def model(self):
        return self.bench.model

    def transformer_options(self):
        return self.patcher.model_options.setdefault("transformer_options", {})


# --- what is being asked for ------------------------------------------------------------------


@case("short_run")
def _(attempt):
    attempt.options["min_steps"] = STEPS + 1


@case("native_cache_off")
def _(attempt):
    attempt.transformer_options()["qwen_image21_cache"] = {"device": "off", "dtype": "default"}


@case("native_cache_host")
def _(attempt):
    attempt.transformer_options()["qwen_image21_cache"] = {"device": "cpu", "dtype": "default"}


@case("kv_quantized")
def _(attempt):
    # The stand-in stores nothing else than what it computes; the name alone counts.
    if attempt.bench.kind == "standin":
        attempt.transformer_options()["qwen_image21_cache"] = {"device": "gpu", "dtype": "int8"}
    else:
        attempt.transformer_options()["qwen_image21_cache"] = {"dtype": "int8"}


@case("graphs_disabled")
def _(attempt):
    from comfy.cli_args import args

    attempt.monkeypatch.setattr(args, "disable_cuda_graphs", True, raising=False)


# --- the weights ------------------------------------------------------------------------------


@case("weights_streamed")
def _(attempt):
    # On a machine with one device, another one that parameters can lie on.
    model = attempt.model
    model.spare = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)


@case("weight_functions")
def _(attempt):
    linear = attempt.model.transformer_blocks[1].attn.to_k

    def load_with_lora(executor, *args, **kwargs):
        # What a load that does not fit leaves behind; there is no device here to fill.
        linear.weight_function = [lambda weight: weight * 1.5]
        linear.comfy_cast_weights = True
        return executor(*args, **kwargs)

    attempt.patcher.add_wrapper_with_key("sampler_sample", "lowvram", load_with_lora)


@case("weight_wrappers")
def _(attempt):
    name = "diffusion_model.transformer_blocks.0.attn.to_q.weight"
    attempt.patcher.weight_wrapper_patches[name] = []
    # No node of ComfyUI's puts one there without loading; what it does is not of interest.
    attempt.monkeypatch.setattr(type(attempt.patcher), "load", _load_without(name))


def _load_without(name):
    from comfy.model_patcher import ModelPatcher

    load = ModelPatcher.load

    def without(self, *args, **kwargs):
        kept = self.weight_wrapper_patches
        self.weight_wrapper_patches = {k: v for k, v in kept.items() if k != name}
        try:
            return load(self, *args, **kwargs)
        finally:
            self.weight_wrapper_patches = kept

    return without


@case("weight_hooks")
def _(attempt):
    import comfy.hooks

    delta = torch.ones_like(attempt.model.img_in.weight)
    group = comfy.hooks.create_hook_lora({}, 1.0, 1.0)
    hook = group.hooks[0]
    hook.weights = {}
    attempt.patcher.add_hook_patches(hook, {"diffusion_model.img_in.weight": ("diff", (delta,))})


@case("weight_type")
def _(attempt):
    class Strange(torch.Tensor):
        pass

    weight = attempt.model.img_in.weight
    attempt.model.img_in.weight = torch.nn.Parameter(
        weight.data.as_subclass(Strange), requires_grad=False
    )


# --- what other nodes have done ---------------------------------------------------------------


@case("injections")
def _(attempt):
    from comfy.patcher_extension import PatcherInjection

    nothing = PatcherInjection(lambda patcher: None, lambda patcher: None)
    attempt.patcher.set_injections("bypass_lora", [nothing])


@case("object_patches")
def _(attempt):
    linear = attempt.model.transformer_blocks[0].attn.to_q
    attempt.patcher.add_object_patch("diffusion_model.transformer_blocks.0.attn.to_q", linear)


@case("module_hooks")
def _(attempt):
    attempt.model.transformer_blocks[1].register_forward_hook(lambda *seen: None)


@case("block_patches")
def _(attempt):
    attempt.patcher.set_model_patch(lambda args: args, "post_input")


@case("block_patches")
def _(attempt):
    attempt.patcher.set_model_patch_replace(
        lambda args, extra: extra["original_block"](args), "dit", "single_block", 1
    )
    # The stand-in has no such door; it has to see that one is asked for all the same.


@case("other_wrappers")
def _(attempt):
    def wrap(executor, *args, **kwargs):
        return 0.5 * executor(*args, **kwargs)

    def behind(patcher):
        patcher.add_wrapper_with_key("diffusion_model", "theirs", wrap)
        return patcher

    attempt.behind = behind


@case("attention_override")
def _(attempt):
    def theirs(function, *args, **kwargs):
        return 0.5 * function(*args, **kwargs)

    attempt.transformer_options()["optimized_attention_override"] = theirs


@case("attention_backend")
def _(attempt):
    from comfy.ldm.modules.attention import attention_sub_quad

    def optimized_attention_override(_, *args, **kwargs):
        return attention_sub_quad(*args, **kwargs)

    optimized_attention_override.__qualname__ = "ModelPatcher.set_model_optimized_attention.x"
    attempt.transformer_options()["optimized_attention_override"] = optimized_attention_override


@case("controlnet")
def _(attempt):
    def add(executor, *args, **kwargs):
        return executor(*args[:4], {"middle": []}, *args[5:], **kwargs)

    attempt.patcher.add_wrapper_with_key("apply_model", "control", add)


@case("padded_text")
def _(attempt):
    def add(executor, *args, **kwargs):
        return executor(*args, **kwargs, attention_mask=torch.ones(1, 9))

    attempt.patcher.add_wrapper_with_key("apply_model", "mask", add)


@case("context_windows")
def _(attempt):
    attempt.transformer_options()["context_window"] = object()


@case("multi_gpu")
def _(attempt):
    attempt.transformer_options()["multigpu_thread_device"] = "cuda:1"


@case("compiled")
def _(attempt):
    def wrap(executor, *args, **kwargs):
        return executor(*args, **kwargs)

    attempt.patcher.add_wrapper_with_key("apply_model", "torch.compile", wrap)


@case("training")
def _(attempt):
    from comfy import model_management

    # ComfyUI's step is another one then; ours must not be used at all.
    attempt.monkeypatch.setattr(model_management, "in_training", True, raising=False)


@case("conditioning_changed")
def _(attempt):
    calls = []

    def change(executor, x, t, c_concat, c_crossattn, *args, **kwargs):
        calls.append(1)
        prompt = c_crossattn * (1 + 0.1 * (len(calls) % STEPS))
        return executor(x, t, c_concat, prompt, *args, **kwargs)

    attempt.patcher.add_wrapper_with_key("apply_model", "schedule", change)
    attempt.calls = STEPS - 1


@case("structure_unknown")
def _(attempt):
    wider = torch.nn.Linear(attempt.model.inner_dim, 3 * 64, bias=False)
    wider.requires_grad_(False)
    narrow = attempt.model.proj_out

    class Heads(torch.nn.Module):
        weight = wider.weight

        def forward(self, x):
            return narrow(x)

    attempt.model.proj_out = Heads()


@case("layout_unsupported")
def _(attempt):
    from workbench import prompt

    positive = prompt(1, references=2)
    positive[0][1]["image_slots"] = [5, 2]
    attempt.job["positive"] = positive
    if attempt.bench.kind == "native":
        # A text run of negative length: the model puts the same text in twice.
        attempt.calls = STEPS


@case("off")
def _(attempt):
    attempt.options["mode"] = "off"


# --- ComfyUI itself ---------------------------------------------------------------------------


@case("core_graphs")
def _(attempt):
    attempt.model.transformer_blocks[0]._comfy_graph = {}


@case("memory_recorder")
def _(attempt):
    import sys
    import threading
    import types

    recorder = types.SimpleNamespace(_comfy_active=True)
    prefetch = sys.modules.get("comfy.model_prefetch")
    if prefetch is None:
        prefetch = types.ModuleType("comfy.model_prefetch")
        attempt.monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    recorders = {threading.get_ident(): recorder}
    attempt.monkeypatch.setattr(prefetch, "MALLOC_GRAPHS", recorders, raising=False)


ALL = [(code, index) for code, cases in CASES.items() for index in range(len(cases))]
IDS = [f"{code}{index or ''}" for code, index in ALL]


@pytest.mark.parametrize(("code", "index"), ALL, ids=IDS)
def test_reason(bench, monkeypatch, code, index):
    prepare, others = CASES[code][index]
    attempt = Attempt(bench, monkeypatch)
    if code == "weights_streamed":
        # Only the check may see the parameter that lies elsewhere.
        monkeypatch.setattr(type(attempt.patcher), "load", lambda self, *args, **kwargs: None)
    prepare(attempt)
    theirs = bench.sample(attempt.behind(attempt.patcher.clone()), steps=STEPS, **attempt.job)
    ours, _ = bench.patch(attempt.patcher, capturer=FakeCapturer(), **attempt.options)
    ours = attempt.behind(ours)
    assert torch.equal(bench.sample(ours, steps=STEPS, **attempt.job), theirs)
    report = bench.report
    assert code in report.fallbacks, report.fallbacks
    assert set(report.fallbacks) - {code} <= others | {"warm_up", "mode_buffers"}
    assert counters_add_up(report, STEPS)
    path = REASONS[code].path
    taken = {step.path for step in report.steps if step.reason == code}
    assert taken == {path}
    # A reason against graphs speaks at decode steps, one against the cache at every step.
    expected = attempt.calls or (STEPS - 1 if path is Path.BUFFERS else STEPS)
    assert sum(step.reason == code for step in report.steps) == expected


def test_every_reason_has_a_case():
    assert {reason.code for reason in ROWS} <= set(CASES)


def test_another_model_passes_through_unchanged():
    comfy_env.load()
    from types import SimpleNamespace

    from graph_cache.models.comfyui import Options, patch

    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2)))
    passed, why = patch(other, Options(), print)
    assert passed is other
    assert why.code == "not_qwen21" and "Linear" in why.sentence


def test_an_attention_chosen_through_comfyui_is_known(bench):
    """ComfyUI's own node for it makes an override that stands for a known function."""
    from comfy.ldm.modules.attention import attention_pytorch

    from graph_cache.models.comfyui.checks import attention_names

    def optimized_attention_override(_, *args, **kwargs):
        return attention_pytorch(*args, **kwargs)

    optimized_attention_override.__qualname__ = "ModelPatcher.set_model_optimized_attention.x"
    options = {"optimized_attention_override": optimized_attention_override}
    assert attention_names(bench.model, options) == ["attention_pytorch"]


def test_an_attention_of_one_layer_is_part_of_the_key(bench):
    from types import SimpleNamespace

    from graph_cache.models.comfyui.checks import attention_fallbacks

    def attention_of_a_checkpoint():
        pass

    block = bench.model.transformer_blocks[1]
    chosen = SimpleNamespace(function=attention_of_a_checkpoint)
    block.attn.__dict__["comfy_attention"] = chosen
    block.attn._modules.pop("comfy_attention", None)
    (found,) = attention_fallbacks(bench.model, {})
    assert found.code == "attention_backend" and "of_a_checkpoint" in found.sentence
