"""Benchmark in ComfyUI: its own cached step against prefix buffers and graph replay.

    python benchmarks/comfyui.py --comfyui PATH --weights int8 --patcher dynamic

One process, ComfyUI's own sampler, the native model at its true size with random weights (or any
other size, for a trial). Every row says whether its picture equals the one of mode off bitwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = 4096
_NEEDED = ("torch", "torchvision", "torchaudio", "comfy_kitchen", "comfy_aimdo")
_MODES = ("off", "buffers", "auto")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI of 0.36 or newer")
    parser.add_argument("--weights", choices=("bf16", "int8"), default="bf16")
    parser.add_argument(
        "--patcher", choices=("dynamic", "classic"), default="dynamic", help="who holds the weights"
    )
    parser.add_argument(
        "--allocator", choices=("async", "native"), default="async", help="async is ComfyUI's own"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["512", "1024", "1024:1"],
        help="SIZE[:REFERENCES[:CFG[:BATCH]]], in pixels; a reference is 1024 x 1024",
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument(
        "--cpu", action="store_true", help="a trial of this script, not a benchmark"
    )
    parser.add_argument("--out", type=Path, help="also write the rows to this JSON file")
    options = parser.parse_args()
    if not (options.comfyui / "comfy").is_dir():
        parser.error(f"{options.comfyui} holds no ComfyUI")
    if not (options.comfyui / "comfy" / "ldm" / "qwen_image21").is_dir():
        parser.error(f"the ComfyUI in {options.comfyui} has no Qwen-Image-2.1")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"run this with the Python of ComfyUI: {', '.join(missing)} is missing here")
    return options


def start_comfyui(options: argparse.Namespace) -> None:
    """Import ComfyUI as its own main does; the order of imports decides what it uses."""
    sys.path[:0] = [str(options.comfyui)]
    sys.path.append(str(ROOT))
    arguments, sys.argv = (
        sys.argv,
        ["main.py", *(["--cpu", "--use-pytorch-cross-attention"] if options.cpu else [])],
    )
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args

    sys.argv = arguments
    if not options.cpu and options.allocator == "async":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    dynamic = options.patcher == "dynamic" and not options.cpu
    if dynamic:
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    # Only now: what stands above has to be settled before torch is loaded.
    import torch

    if not options.cpu and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device; --cpu tries the script out")
    import comfy.model_management

    if dynamic:
        import comfy.memory_management
        import comfy.model_patcher

        devices = comfy.model_management.get_all_torch_devices()
        if not comfy_aimdo.control.init_devices((device.index, 0) for device in devices):
            sys.exit("comfy-aimdo did not initialise: no DynamicVRAM here; use --patcher classic")
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def make_model(options: argparse.Namespace):
    """ComfyUI's MODEL with random weights under the names and types of its own files."""
    import comfy.quant_ops
    import comfy.sd
    import torch

    from graph_cache.checkpoint import expected_shapes

    device = "cpu" if options.cpu else "cuda"
    generator = torch.Generator(device).manual_seed(0)
    shapes = expected_shapes(
        {
            "num_attention_heads": options.heads,
            "attention_head_dim": 128,
            "context_in_dim": _CONTEXT,
            "mlp_ratio": 3,
            "in_channels": 64,
            "out_channels": 64,
            "num_layers": options.layers,
        }
    )
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(".img_mlp.proj.weight"):
            # In ComfyUI's files it is the second half of gate_up.
            continue
        if name.endswith(".img_mlp.gate_layer.weight"):
            name, shape = name.replace("gate_layer", "gate_up"), (2 * shape[0], shape[1])
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        weight = scale * torch.randn(shape, generator=generator, device=device)
        weight = weight.to(torch.bfloat16)
        quantised = options.weights == "int8" and "transformer_blocks" in name and weight.ndim == 2
        if not quantised:
            weights[name] = weight.cpu()
            continue
        layout = comfy.quant_ops.get_layout_class("TensorWiseINT8Layout")
        how = {"convrot": True, "convrot_groupsize": 256}
        data, parameters = layout.quantize(weight, is_weight=True, per_channel=True, **how)
        stem = name.removesuffix(".weight")
        weights[name] = data.cpu()
        weights[f"{stem}.weight_scale"] = parameters.scale.cpu()
        note = json.dumps({"format": "int8_tensorwise", **how}).encode()
        weights[f"{stem}.comfy_quant"] = torch.tensor(list(note), dtype=torch.uint8)
    return comfy.sd.load_diffusion_model_state_dict(weights)


def conditioning(seed: int, tokens: int, references: int) -> list:
    """A random prompt with references."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    content: dict = {"pooled_output": None}
    if references:
        content["image_slots"] = [5] * references
        content["reference_latents"] = [
            torch.randn(1, 64, 64, 64, generator=generator) for _ in range(references)
        ]
    return [[torch.randn(1, tokens, _CONTEXT, generator=generator), content]]


def bench_case(model, case: str, steps: int) -> list[dict]:
    """Every mode on one case; the second picture of a session is timed, with another prompt."""
    import torch

    import nodes
    from graph_cache.models.comfyui import Options, patch

    size, references, cfg, batch = (*map(int, case.split(":")), *(0, 1, 1)[case.count(":") :])
    latent = {"samples": torch.zeros(batch, 64, size // 16, size // 16)}
    expected, rows = None, []
    for mode in _MODES:
        reports: list = []
        options = Options(mode, "always" if mode != "off" else "never", keep_between_runs=True)
        patched, runtime = patch(model, options, reports.append)
        for seed in (1, 2):
            if seed == 2:
                runtime._cache.verify = "never"
            positive, negative = (
                conditioning(seed, 100, references),
                conditioning(9, 33, references),
            )
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            (out,) = nodes.common_ksampler(
                patched, seed, steps, float(cfg), "euler", "simple", positive, negative, latent
            )
            seconds = time.perf_counter() - began
        expected = out["samples"] if mode == "off" else expected
        report = reports[-1]
        kind = {"off": "eager (off)", "buffers": "eager (mode_buffers)", "auto": "replayed"}[mode]
        times = report.timings()
        row = {
            "case": case,
            "mode": mode,
            **times.get(kind, {"host_ms": None, "gpu_ms": None}),
            "run_s": round(seconds, 3),
            "equal": bool(torch.equal(out["samples"], expected)),
            "counts": report.counts,
            "captures": report.captures,
            "first_run": {"captures": reports[0].captures, "s": reports[0].capture_seconds},
            "peak_mib": report.peak_bytes >> 20,
            "reasons": {c: f.detail for c, f in report.fallbacks.items() if not f.reason.expected},
            "verified": reports[0].verified,
        }
        runtime.release()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """Run all cases."""
    options = parse()
    start_comfyui(options)
    import torch

    about = {
        "machine": platform.processor() or platform.machine(),
        "gpu": "none" if options.cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocator": "none" if options.cpu else torch.cuda.get_allocator_backend(),
        **{name: getattr(options, name) for name in ("weights", "patcher", "steps", "layers")},
    }
    print(json.dumps(about), flush=True)
    # ComfyUI runs whole workflows in it, loading included.
    with torch.inference_mode():
        model = make_model(options)
        about["model_patcher"] = type(model).__name__
        rows = [row for case in options.cases for row in bench_case(model, case, options.steps)]
    if options.out:
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
