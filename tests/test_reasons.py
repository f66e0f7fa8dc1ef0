"""Every reason of the table, produced by what really causes it.

Each case says what is done to model or call, which path the steps then take, and that the picture
is the one of the unpatched model. The last test fails if a reason of the table has no case.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from diffusers.models.transformers import transformer_qwenimage21 as qwen
from helpers import TEXT, FakeCapturer, counters_add_up, same

from graph_cache import REASONS, GraphCache, Path
from graph_cache.layout import SequenceLayout
from graph_cache.reason_table import ROWS
from graph_cache.reasons import Fallback
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

STEPS = 5
CASES: dict[str, types.FunctionType] = {}


def case(code: str):
    """Register a case; it gets an `Attempt` and prepares it."""

    def register(prepare):
        CASES.setdefault(code, []).append(prepare)
        return prepare

    return register


class Attempt:
    """A run that something stands against."""

    def __init__(self) -> None:
        self.model = tiny_transformer()
        self.work = Workload(self.model, [TEXT])
        self.capturer = FakeCapturer()
        self.options: dict = {}
        self.cached = True
        self.around = contextlib.nullcontext()
        # Done after the cache is attached, to what only counts from then on.
        self.afterwards = lambda cache: None
        self.monkeypatch: pytest.MonkeyPatch
        # The unpatched model's outputs, where they cannot be taken after the preparation.
        self.expected: list[torch.Tensor] | None = None
        self.calls_with_reason: int | None = None

    def run(self):
        with self.around:
            return self.work.run(STEPS, cached=self.cached).outputs


# --- the normal course ------------------------------------------------------------------------


@case("warm_up")
def _(attempt):
    attempt.calls_with_reason = 1


@case("mode_buffers")
def _(attempt):
    attempt.options["mode"] = "buffers"


@case("off")
def _(attempt):
    attempt.options["mode"] = "off"


# --- what is being asked for ------------------------------------------------------------------


@case("structure_unknown")
def _(attempt):
    block = attempt.model.transformer_blocks[1]
    block.extra_norm = torch.nn.Identity()


@case("structure_unknown")
def _(attempt):
    """A later version whose forward takes one more argument, and is given it."""
    from graph_cache.models.diffusers_checks import _KNOWN_CODE

    model_class = qwen.QwenImage21Transformer2DModel
    plain = model_class.forward

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        timestep,
        img_shapes,
        img_mask,
        encoder_hidden_states_mask=None,
        attention_kwargs=None,
        kv_cache=None,
        kv_cache_mode=None,
        return_dict=True,
        strength=1.0,
    ):
        return plain(
            self,
            hidden_states,
            encoder_hidden_states,
            timestep,
            img_shapes,
            img_mask,
            kv_cache=kv_cache,
            kv_cache_mode=kv_cache_mode,
            return_dict=return_dict,
        )

    attempt.monkeypatch.setattr(model_class, "forward", forward)
    attempt.monkeypatch.setitem(_KNOWN_CODE, model_class, forward)
    arguments = attempt.work.arguments
    attempt.work.arguments = lambda *args: {**arguments(*args), "strength": 0.5}


@case("not_causal")
def _(attempt):
    attempt.model.register_to_config(causal_condition=False)
    attempt.cached = False


@case("no_kv_cache")
def _(attempt):
    attempt.cached = False


@case("training")
def _(attempt):
    attempt.around = torch.enable_grad()


@case("autocast")
def _(attempt):
    attempt.around = torch.autocast("cpu", dtype=torch.bfloat16)


@case("padded_text")
def _(attempt):
    plain = attempt.work.arguments

    def padded(*args):
        arguments = plain(*args)
        mask = torch.ones(arguments["encoder_hidden_states"].shape[:2], dtype=torch.bool)
        mask[:, -2:] = False
        return {**arguments, "encoder_hidden_states_mask": mask}

    attempt.work.arguments = padded


@case("layout_unsupported")
def _(attempt):
    """Text after the target."""
    mask = attempt.work.masks[0]
    attempt.work.masks[0] = torch.cat([mask, torch.zeros(1, 3, dtype=torch.bool)], dim=1)
    width = attempt.work.prompts[0].shape[2]
    attempt.work.prompts[0] = torch.cat([attempt.work.prompts[0], torch.randn(1, 3, width)], dim=1)


# --- the device -------------------------------------------------------------------------------


@case("no_cuda")
def _(attempt):
    attempt.options["capturer"] = None


@case("rocm")
def _(attempt):
    from graph_cache.cuda_graphs import CudaCapturer

    capturer = CudaCapturer()
    attempt.monkeypatch.setattr(torch.version, "hip", "7.0")
    attempt.capturer.unavailable = lambda device: capturer.unavailable(torch.device("cuda", 0))


@case("device_mismatch")
def _(attempt):
    """A weight elsewhere; on the meta device the model itself can still run without it."""
    attempt.model.register_buffer("elsewhere", torch.empty(1, device="meta"))


@case("nested_capture")
def _(attempt):
    from graph_cache import eligibility

    real = eligibility.call_fallback

    # There is no CUDA stream to ask on this machine; tests/gpu asks a real one.
    def capturing(device):
        return real(device) or Fallback("nested_capture")

    attempt.monkeypatch.setattr("graph_cache.dispatcher.call_fallback", capturing)


@case("vram")
def _(attempt):
    attempt.monkeypatch.setattr("graph_cache.entries.available_bytes", lambda *args: 1000)


@case("vram")
def _(attempt):
    """Allocation fails although memory was counted as free."""

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    attempt.monkeypatch.setattr("graph_cache.entries.PrefixBuffers", refuse)


@case("vram")
def _(attempt):
    """The decode step itself runs out of memory: the buffers go, the model's path finishes."""

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    attempt.monkeypatch.setattr("graph_cache.models.diffusers_step.decode", refuse)
    attempt.calls_with_reason = STEPS - 1


@case("vram")
def _(attempt):
    """The prefill runs out of memory because of our buffers, and passes without them."""
    from graph_cache.models.diffusers_prefix import PrefixSink

    def refuse(self, buffers):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    attempt.monkeypatch.setattr(PrefixSink, "__init__", refuse)


@case("budget")
def _(attempt):
    attempt.options["max_bytes"] = 1000


@case("budget")
def _(attempt):
    attempt.work = Workload(attempt.model, [TEXT, SequenceLayout((3,), (), (1, 4, 6))])
    attempt.options["max_entries"] = 1
    # The second conditioning has no room: its prefill and its decode steps.
    attempt.calls_with_reason = STEPS


@case("graph_budget")
def _(attempt):
    cache = GraphCache.attach(attempt.model, headroom_bytes=0, capturer=FakeCapturer())
    attempt.run()
    attempt.options["max_bytes"] = cache.report().buffer_bytes + 1
    cache.detach()


# --- what has been done to the model ----------------------------------------------------------


class _Parallel:
    def __init__(self, ring=1, ulysses=1, tensor=False):
        self.tensor_parallel_config = object() if tensor else None
        self.context_parallel_config = None
        if not tensor:
            self.context_parallel_config = types.SimpleNamespace(
                ring_degree=ring, ulysses_degree=ulysses
            )


def _parallel(attempt, config):
    """Only the model's record of it: one process cannot run the real thing."""
    attempt.expected = attempt.run()
    attempt.model._parallel_config = config


@case("sequence_parallel")
def _(attempt):
    _parallel(attempt, _Parallel(ulysses=2))


@case("ring_parallel")
def _(attempt):
    _parallel(attempt, _Parallel(ring=2))


@case("tensor_parallel")
def _(attempt):
    _parallel(attempt, _Parallel(tensor=True))


@case("fully_sharded")
def _(attempt):
    """The mark that fully_shard leaves on a module's class."""
    block = attempt.model.transformer_blocks[0]
    fsdp = type("FSDPModule", (), {})
    block.__class__ = type("FSDP" + type(block).__name__, (fsdp, type(block)), {})


@case("offload_hooks")
def _(attempt):
    apply_group_offloading(
        attempt.model,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )


@case("offload_hooks")
def _(attempt):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for block in attempt.model.transformer_blocks:
        add_hook_to_module(block, AlignDevicesHook(execution_device="cpu"))


@case("offload_hooks")
def _(attempt):
    attempt.model.enable_layerwise_casting(
        storage_dtype=torch.bfloat16, compute_dtype=torch.float32
    )


@case("cache_hooks")
def _(attempt):
    """diffusers' own; within its timestep range it skips attention at every second call."""
    attempt.model.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 0
        )
    )
    registries = [m for m in attempt.model.modules() if hasattr(m, "_diffusers_hook")]
    assert any(m._diffusers_hook.hooks for m in registries)


@case("cache_hooks")
def _(attempt):
    """First-block-cache under the name that diffusers gives it; it does not know this model yet."""
    block = attempt.model.transformer_blocks[0]
    registry = HookRegistry.check_if_exists_or_initialize(block)
    registry.register_hook(ModelHook(), "fbc_leader_block_hook")


@case("module_hooks")
def _(attempt):
    handle = attempt.model.transformer_blocks[1].attn.register_forward_hook(
        lambda module, args, output: output * 0.5
    )
    assert handle is not None


@case("module_hooks")
def _(attempt):
    block = attempt.model.transformer_blocks[1]
    plain = block.forward
    block.forward = lambda *args, **kwargs: plain(*args, **kwargs) * 0.5


@case("module_hooks")
def _(attempt):
    """The model's own forward is patched before the cache is attached."""
    plain = attempt.model.forward

    def halved(*args, **kwargs):
        return (plain(*args, **kwargs)[0] * 0.5,)

    attempt.model.forward = halved


@case("module_hooks")
def _(attempt):
    """A class is patched for the whole process, as some packs do."""
    plain = qwen.QwenImage21AttnProcessor.__call__
    attempt.monkeypatch.setattr(
        qwen.QwenImage21AttnProcessor,
        "__call__",
        lambda self, *args, **kwargs: plain(self, *args, **kwargs) * 0.5,
    )


@case("structure_unknown")
def _(attempt):
    """A block of another class with the same children."""

    class Halved(qwen.QwenImage21TransformerBlock):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 0.5

    attempt.model.transformer_blocks[1].__class__ = Halved


@case("compiled")
def _(attempt):
    for block in attempt.model.transformer_blocks:
        block.compile(backend="eager")


@case("lora_dynamic")
def _(attempt):
    from peft import LoraConfig

    attempt.model.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    attempt.model.requires_grad_(False)


@case("weight_type")
def _(attempt):
    class Packed(torch.nn.Parameter):
        pass

    attention = attempt.model.transformer_blocks[0].attn
    weight = torch.Tensor._make_subclass(Packed, attention.to_q.weight.data, False)
    attention.to_q.weight = weight
    assert type(attention.to_q.weight) is Packed


@case("attention_processor")
def _(attempt):
    class Blurred(qwen.QwenImage21AttnProcessor):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * 0.5

    attempt.model.transformer_blocks[1].attn.set_processor(Blurred())


@case("attention_backend")
def _(attempt):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    name = AttentionBackendName.SAGE
    backends = dict(_AttentionBackendRegistry._backends)
    native = AttentionBackendName.NATIVE
    backends[name] = backends[native]
    attempt.monkeypatch.setattr(_AttentionBackendRegistry, "_backends", backends)
    names = dict(_AttentionBackendRegistry._supported_arg_names)
    names[name] = names[native]
    attempt.monkeypatch.setattr(_AttentionBackendRegistry, "_supported_arg_names", names)
    attempt.monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", name)


class _HalfPrecisionLayer(qwen.QwenImage21KVLayerCache):
    def store(self, k, v):
        super().store(k.half(), v.half())

    def get(self):
        k, v = super().get()
        return k.float(), v.float()


def _own_kv_cache(attempt, layer_class):
    def caches():
        cache = qwen.QwenImage21KVCache(0)
        cache.layer_caches = [layer_class() for _ in attempt.model.transformer_blocks]
        return [cache]

    attempt.work.kv_caches = caches


@case("kv_quantized")
def _(attempt):
    _own_kv_cache(attempt, _HalfPrecisionLayer)
    # What the class stores can only be seen once it has stored something.
    attempt.calls_with_reason = STEPS - 1


@case("kv_cache_type")
def _(attempt):
    class Counting(qwen.QwenImage21KVLayerCache):
        pass

    _own_kv_cache(attempt, Counting)


@case("kv_cache_type")
def _(attempt):
    class Comparable(qwen.QwenImage21KVCache):
        """Cannot be hashed, so it must not be used as a key."""

        def __eq__(self, other):
            return isinstance(other, Comparable)

    layers = len(attempt.model.transformer_blocks)
    attempt.work.kv_caches = lambda: [Comparable(layers)]


# --- a run that goes astray -------------------------------------------------------------------


@case("unregistered")
def _(attempt):
    """The cache is attached when the prefill is over already."""
    work = attempt.work
    kv_cache = work.kv_caches()[0]
    attempt.model(
        **work.arguments(0, work.latents, 1.0), kv_cache=kv_cache, kv_cache_mode="extract"
    )

    class DecodeOnly:
        def run(self, steps, cached=True):
            outputs, latents = [], work.latents.clone()
            for step in range(steps):
                arguments = work.arguments(0, latents, 1 - step / steps)
                arguments |= {"kv_cache": kv_cache, "kv_cache_mode": "cached"}
                outputs.append(attempt.model(**arguments)[0])
                latents = latents - outputs[-1] / steps
            return types.SimpleNamespace(outputs=outputs)

    attempt.work = DecodeOnly()


@case("layout_changed")
def _(attempt):
    """The target is turned on its side in the middle of a run: as many tokens, another RoPE."""
    plain, calls = attempt.work.arguments, iter(range(100))

    def turned(*args):
        arguments = plain(*args)
        if next(calls) % STEPS >= 2:
            arguments["img_shapes"] = [[(1, 6, 4)]]
        return arguments

    attempt.work.arguments = turned
    attempt.calls_with_reason = STEPS - 2


@case("layout_changed")
def _(attempt):
    """A callback hands contiguous latents on instead of the pipeline's transposed ones."""
    plain, calls = attempt.work.arguments, iter(range(100))

    def contiguous(*args):
        arguments = plain(*args)
        if next(calls) % STEPS == 3:
            arguments["hidden_states"] = arguments["hidden_states"].contiguous()
        return arguments

    attempt.work.arguments = contiguous
    attempt.calls_with_reason = 1


@case("prefix_replaced")
def _(attempt):
    """Somebody swaps the cached values of a layer between two steps."""
    made, calls = [], iter(range(100))
    plain_caches, plain_arguments = attempt.work.kv_caches, attempt.work.arguments

    def caches():
        made[:] = plain_caches()
        return made

    def swapping(*args):
        if next(calls) % STEPS == 3:
            layer = made[0].layer_caches[1]
            layer.store(layer.k * 0.5, layer.v * 2)
        return plain_arguments(*args)

    attempt.work.kv_caches, attempt.work.arguments = caches, swapping
    attempt.calls_with_reason = STEPS - 3


@case("weights_changed")
def _(attempt):
    """A weight is replaced between two steps of a run, under a captured graph."""
    plain, calls = attempt.work.arguments, iter(range(100))

    def replacing(*args):
        if next(calls) % STEPS == 3:
            linear = attempt.model.transformer_blocks[0].attn.to_q
            linear.weight = torch.nn.Parameter(linear.weight.clone(), requires_grad=False)
        return plain(*args)

    attempt.work.arguments = replacing
    attempt.calls_with_reason = 1


@case("host_sync")
def _(attempt):
    # What a real GPU makes of a hidden .item() is in tests/gpu.
    attempt.capturer.why_no_capture = Fallback("host_sync", "model.py:12")
    attempt.calls_with_reason = STEPS - 2


@case("capture_failed")
def _(attempt):
    attempt.capturer.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    attempt.calls_with_reason = STEPS - 2


@case("vram_graph")
def _(attempt):
    attempt.capturer.error = torch.OutOfMemoryError("CUDA out of memory.")
    attempt.calls_with_reason = STEPS - 2


@case("settings_changed")
def _(attempt):
    """Another attention kernel is chosen in the middle of a run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plain, calls = attempt.work.arguments, iter(range(100))
    chosen = contextlib.ExitStack()

    def choosing(*args):
        step = next(calls) % STEPS
        if step == 3:
            chosen.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif step == 0:
            chosen.close()
        return plain(*args)

    attempt.work.arguments = choosing
    attempt.calls_with_reason = STEPS - 3


@case("parity_graph")
def _(attempt):
    attempt.capturer.corrupt_replays = True
    attempt.calls_with_reason = STEPS - 2


@case("parity")
def _(attempt):
    """Our step computes something else than the model: nobody gets to see it."""
    from graph_cache.models import diffusers_step

    real = diffusers_step.decode
    attempt.monkeypatch.setattr(diffusers_step, "decode", lambda *args: real(*args) * 1.0001)


@case("parity_fast")
def _(attempt):
    """A fast step that is more than rounding away: nobody gets to see it."""
    from graph_cache.models import diffusers_fast

    real = diffusers_fast.step
    attempt.monkeypatch.setattr(diffusers_fast, "step", lambda *args: real(*args) * 1.01)
    attempt.options = {"profile": "fast"}
    attempt.calls_with_reason = STEPS - 1


@case("fast_failed")
def _(attempt):
    """The fast step stumbles, over a compiler that is not there for one."""

    def stumble(*args):
        raise RuntimeError("Triton: CalledProcessError: gcc")

    attempt.monkeypatch.setattr("graph_cache.models.diffusers_fast.step", stumble)
    attempt.options = {"profile": "fast"}
    attempt.calls_with_reason = STEPS - 1


@case("step_failed")
def _(attempt):
    """Our step stumbles over a model that is not what it seems."""

    def stumble(*args):
        raise AttributeError("'QwenImage21Attention' object has no attribute 'to_v'")

    attempt.monkeypatch.setattr("graph_cache.models.diffusers_step.decode", stumble)
    attempt.calls_with_reason = STEPS - 1


# --- the test -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "number"), [(code, n) for code, cases in CASES.items() for n in range(len(cases))]
)
def test_reason(code, number, attach, monkeypatch):
    attempt = Attempt()
    attempt.monkeypatch = monkeypatch
    CASES[code][number](attempt)
    expected = attempt.expected if attempt.expected is not None else attempt.run()
    cache = attach(attempt.model, **{"capturer": attempt.capturer, **attempt.options})
    outputs = attempt.run()
    assert same(outputs, expected), "the picture must be the unpatched model's"
    report = cache.report()
    layouts = len(getattr(attempt.work, "layouts", [0]))
    assert counters_add_up(report, STEPS, layouts)
    assert code in report.fallbacks
    with_reason = [step for step in report.steps if step.reason == code]
    assert with_reason
    if attempt.calls_with_reason is not None:
        assert len(with_reason) == attempt.calls_with_reason
    path = REASONS[code].path
    assert all(step.path is path for step in with_reason)
    if path is Path.NATIVE and attempt.calls_with_reason is None:
        assert all(step.path is Path.NATIVE for step in report.steps if step.reason)
    said = next(row for row in report.to_dict()["fallbacks"] if row["code"] == code)
    assert said["calls"] == len(with_reason)
    assert said["sentence"] and said["hint"]
    assert "{" not in said["sentence"] + said["hint"]


@pytest.mark.parametrize("wrap", ["linear", "compiled", "sharded"])
def test_models_that_are_not_ours_are_left_alone(wrap, model, caplog):
    if wrap == "linear":
        other, code = torch.nn.Linear(2, 2), "not_qwen21"
    elif wrap == "compiled":
        other, code = torch.compile(model, backend="eager"), "compiled"
    else:
        wrapper = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
        wrapper.module = model
        other, code = wrapper, "fully_sharded"
    before = dict(vars(other))
    cache = GraphCache.attach(other)
    assert vars(other) == before
    assert list(cache.report().fallbacks) == [code]
    assert REASONS[code].hint in caplog.text
    cache.clear()
    cache.detach()


def test_a_model_compiled_as_a_whole_says_so(model, attach):
    """Its calls never come to us, so the report has to find out."""
    cache = attach(model)
    model.compile(backend="eager")
    assert "compiled" in cache.report().fallbacks


def test_fused_lora_replays(model, attach, capturer):
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    model.requires_grad_(False)
    model.fuse_lora()
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().counts["replayed"] == STEPS - 3


def test_every_reason_has_a_case():
    # The second leaves a graph, so no step has it: tests/fast.
    elsewhere = {"not_qwen21", "profile_exact"}
    # ComfyUI's own are tested in tests/comfyui.
    assert set(CASES) | elsewhere == {reason.code for reason in ROWS}
    assert not set(CASES) & elsewhere


def test_unknown_codes_are_refused():
    with pytest.raises(KeyError, match="no_such_reason"):
        Fallback("no_such_reason")
