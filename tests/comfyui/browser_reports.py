"""Reports as a machine with a GPU sends them; the figures are made up."""


def report(**changes):
    """A report as a machine with a GPU sends it."""
    steps = changes.pop("steps", 25)
    made = {
        "schema": 1,
        "run": 3,
        "adapter": "comfyui",
        "mode": "auto",
        "path": "graph",
        "profile": "exact",
        "device": "NVIDIA GeForce RTX 4090",
        "dtype": "bfloat16",
        "attention": "attention_pytorch",
        "torch": "2.11.0+cu130",
        "calls": steps,
        "counts": {"prefill": 1, "captured": 1, "replayed": steps - 3, "eager": 1},
        "eager_reasons": {"warm_up": 1},
        "ms_per_call": {},
        "fallbacks": [fallback("warm_up", "The first decode step runs eagerly.", expected=True)],
        "conditionings": [
            {
                "prefix_tokens": 4196,
                "references": 1,
                "target_tokens": 4096,
                "buffer_bytes": 2_230_000_000,
            }
        ],
        "captures": 1,
        "capture_seconds": 0.041,
        "entries": 1,
        "buffer_bytes": 0,
        "graph_bytes": 0,
        "peak_bytes": 2_400_000_000,
        "planned_steps": steps,
        "step_ms": 31.2,
        "native_step_ms": 44.6,
        "seconds_saved": 0.32,
        "weights": "int8, DynamicVRAM, resident",
        "verified": {"body": True, "replay": True},
        "error": None,
    }
    return made | changes


def fallback(code, sentence, hint="Nothing to do.", path="buffers", expected=False):
    return {
        "code": code,
        "calls": 1,
        "path": path,
        "expected": expected,
        "sentence": sentence,
        "hint": hint,
    }


STREAMED = fallback(
    "weights_streamed",
    "The model is not wholly on the GPU, so its weights are brought to it in turn (31 of 40).",
    "A smaller image, a quantised model or fewer loaded models leave it more room.",
)
WRAPPED = fallback(
    "other_wrappers",
    "Another node's wrapper stands between the cache and the model (teacache).",
    "Place the graph cache node last, directly in front of the sampler.",
    "native",
)
PATCHED = fallback(
    "block_patches", "A node patches the model's blocks.", "Remove that node.", "native"
)
EAGER = {"prefill": 1, "captured": 0, "replayed": 0, "eager": 24}


STATES = {
    "replaying": (report(), "Replaying", "good", "23 of 25 replayed · 31 ms"),
    "buffers": (
        report(path="buffers", counts=EAGER, captures=0, fallbacks=[STREAMED]),
        "Buffers",
        "warn",
        "1 prefill, 24 eager · 31 ms",
    ),
    "native": (
        report(path="native", counts=EAGER, captures=0, fallbacks=[WRAPPED, PATCHED]),
        "Native",
        "warn",
        "1 prefill, 24 eager · 31 ms",
    ),
    "off": (
        report(mode="off", path="native", counts=EAGER, captures=0, fallbacks=[]),
        "Off",
        "plain",
        "1 prefill, 24 eager · 31 ms",
    ),
    "cancelled": (
        report(error="InterruptProcessingException: InterruptProcessingException", steps=9),
        "Cancelled",
        "warn",
        "7 of 9 replayed",
    ),
    "failed": (report(error="OutOfMemoryError: no room"), "Failed", "bad", "OutOfMemoryError"),
}
