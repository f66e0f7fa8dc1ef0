"""The export to ComfyUI's files: names, shapes, errors; and what a real ComfyUI makes of them."""

from __future__ import annotations

import json
import re
import shutil

import comfy_env
import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from safetensors.torch import load_file, save_file

from examples.tiny.export import LEVELS, NAME, comfyui_name, comfyui_vae, export, main, widen
from examples.tiny.models import CHANNELS
from graph_cache.checkpoint import CheckpointError
from graph_cache.demo_pipeline import load_small
from graph_cache.layout import SequenceLayout
from graph_cache.loading import load_transformer
from graph_cache.tiny import random_weights
from graph_cache.workload import Workload

VAE_FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def exported(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("models")
    export(model_folder, out)
    return out


@pytest.fixture(scope="module")
def transformer_file(exported):
    return exported / "diffusion_models" / f"{NAME}.safetensors"


@pytest.fixture(scope="module")
def vae_file(exported):
    return exported / "vae" / f"{NAME}.safetensors"


@pytest.fixture(scope="module")
def small_vae(model_folder) -> AutoencoderKLQwenImage21:
    return load_small(model_folder).vae


def wide_vae(**config) -> AutoencoderKLQwenImage21:
    """Of ComfyUI's levels, with the published statistics."""
    sizes = {"dim_mult": list(LEVELS), "num_res_blocks": 2}
    return AutoencoderKLQwenImage21(base_dim=16, decoder_base_dim=16, **{**sizes, **config}).eval()


def undone(state: dict[str, torch.Tensor], like: AutoencoderKLQwenImage21) -> dict:
    """A ComfyUI state under diffusers' names, without the time axis."""
    names = {comfyui_name(key): (key, value.shape) for key, value in like.state_dict().items()}
    assert sorted(names) == sorted(state)
    return {names[key][0]: value.reshape(names[key][1]) for key, value in state.items()}


def statistics(vae: AutoencoderKLQwenImage21) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )


def normalised(vae: AutoencoderKLQwenImage21, pixels: torch.Tensor) -> torch.Tensor:
    mean, std = statistics(vae)
    return (vae.encode(pixels).latent_dist.mode() - mean) / std


def decoded(vae: AutoencoderKLQwenImage21, latents: torch.Tensor) -> torch.Tensor:
    mean, std = statistics(vae)
    return vae.decode(latents * std + mean).sample


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def pixels() -> torch.Tensor:
    return 2 * torch.rand(1, 4, 1, 64, 96, generator=torch.Generator().manual_seed(1)) - 1


def latents() -> torch.Tensor:
    return torch.randn(1, CHANNELS, 1, 4, 6, generator=torch.Generator().manual_seed(2))


# --- the files --------------------------------------------------------------------------------


def test_there_are_two_files(exported):
    files = [path.relative_to(exported).as_posix() for path in exported.rglob("*.*")]
    assert sorted(files) == [f"diffusion_models/{NAME}.safetensors", f"vae/{NAME}.safetensors"]


def test_the_transformer_is_untouched(model_folder, transformer_file):
    source = model_folder / "transformer" / VAE_FILE
    assert transformer_file.read_bytes() == source.read_bytes()


def test_comfyuis_detection_finds_what_it_looks_for(vae_file):
    state = load_file(vae_file)
    assert state["decoder.head.2.weight"].shape == (4, 16, 1, 3, 3)
    assert state["encoder.conv1.weight"].shape == (16, 4, 1, 3, 3)
    assert state["decoder.upsamples.0.upsamples.0.residual.2.weight"].shape == (128, 128, 1, 3, 3)
    assert state["decoder.upsamples.0.upsamples.3.resample.1.weight"].shape == (128, 128, 3, 3)
    assert state["encoder.downsamples.1.downsamples.2.time_conv.weight"].shape == (32, 32, 1, 1, 1)
    assert state["encoder.middle.1.norm.gamma"].shape == (128, 1, 1)
    assert state["conv1.weight"].shape == (128, 128, 1, 1, 1)
    assert state["conv2.bias"].shape == (64,)
    assert {value.dtype for value in state.values()} == {torch.float32}
    known = re.compile(
        r"(conv[12]|(en|de)coder\.(conv1|head\.[02]|middle\.(0|1|2)\..+|downsamples\.\d\..+"
        r"|upsamples\.\d\..+))\.(weight|bias|gamma)$"
    )
    assert [key for key in state if not known.match(key)] == []


# --- the mapping ------------------------------------------------------------------------------


def test_renaming_is_a_bijection_and_undone_restores_the_state():
    vae = wide_vae()
    random_weights(vae, 0)
    state = vae.state_dict()
    assert len({comfyui_name(key) for key in state}) == len(state)
    restored = undone(comfyui_vae(state, vae.config), vae)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], value) for key, value in state.items())


def test_padding_loses_nothing(small_vae):
    state = small_vae.state_dict()
    wide = widen(state, small_vae.config)
    for key, value in state.items():
        assert wide[key].count_nonzero() == value.count_nonzero(), key


@torch.no_grad()
def test_the_padded_vae_computes_the_same(small_vae, vae_file):
    wide = wide_vae()
    wide.load_state_dict(undone(load_file(vae_file), wide))
    assert_near(normalised(wide, pixels()), normalised(small_vae, pixels()))
    assert_near(decoded(wide, latents()), decoded(small_vae, latents()))


@pytest.mark.parametrize(
    "sizes", [{"num_res_blocks": 1}, {"dim_mult": [1, 2, 4, 4, 4]}], ids=["blocks", "levels"]
)
@torch.no_grad()
def test_each_padding_by_itself(sizes):
    own = {"latents_mean": [0.5] * CHANNELS, "latents_std": [2.0] * CHANNELS}
    vae, wide = wide_vae(**sizes, **own), wide_vae()
    random_weights(vae, 0)
    wide.load_state_dict(undone(comfyui_vae(vae.state_dict(), vae.config), wide))
    assert_near(normalised(wide, pixels()), normalised(vae, pixels()))
    assert_near(decoded(wide, latents()), decoded(vae, latents()))


# --- errors -----------------------------------------------------------------------------------


@pytest.fixture
def copy(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "copy")
    return tmp_path / "copy"


def _refused(copy, error, match):
    with pytest.raises(error, match=match):
        export(copy, copy / "out")
    assert not (copy / "out").exists()


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_missing_folder_is_named(copy, part):
    shutil.rmtree(copy / part)
    _refused(copy, FileNotFoundError, rf"no .*folder .*{part}")


@pytest.mark.parametrize(
    "part, key",
    [("transformer", "img_in.weight"), ("vae", "encoder.conv_in.weight")],
)
def test_missing_and_unknown_keys_are_named(copy, part, key):
    file = copy / part / VAE_FILE
    state = load_file(file)
    value = state.pop(key)
    save_file(state, file)
    _refused(copy, CheckpointError, rf"{part}.* lacks 1 tensors: {key}")
    save_file({**state, key: value, "surplus": value.clone()}, file)
    _refused(copy, CheckpointError, rf"{part}.* unknown .*surplus")


def test_a_tensor_of_another_shape_is_named(copy):
    file = copy / "vae" / VAE_FILE
    state = load_file(file)
    save_file({**state, "quant_conv.bias": torch.zeros(3)}, file)
    _refused(copy, CheckpointError, r"misshapen .*quant_conv\.bias")


@pytest.mark.parametrize(
    "name, value", [("dim_mult", [1, 2, 3, 4, 4]), ("num_res_blocks", 3), ("z_dim", 48)]
)
def test_a_vae_that_comfyui_cannot_have_is_refused(copy, name, value):
    about = copy / "vae" / "config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), name: value}))
    _refused(copy, CheckpointError, rf"config\.json: .*{name} = ")


def test_files_that_are_there_stay(model_folder, tmp_path, capsys):
    there = tmp_path / "vae" / f"{NAME}.safetensors"
    there.parent.mkdir()
    there.write_text("mine")
    arguments = [str(model_folder), str(tmp_path)]
    assert main(arguments) == 1
    assert f"error: {there} is there already" in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
    assert str(there) in capsys.readouterr().out
    assert "conv1.weight" in load_file(there)


# --- in ComfyUI -------------------------------------------------------------------------------


@pytest.fixture
def native():
    """A ComfyUI that knows Qwen-Image-2.1, in this process."""
    reason = comfy_env.why_not()
    if reason is None and not comfy_env.has_native_model():
        reason = "this ComfyUI has no Qwen-Image-2.1; set COMFYUI_PATH to version 0.36 or newer"
    if reason:
        pytest.skip(reason)
    comfy_env.load()


@pytest.mark.comfyui
@pytest.mark.parametrize("references", [0, 1])
@torch.no_grad()
def test_comfyuis_transformer_computes_the_same(native, model_folder, transformer_file, references):
    import comfy.model_management
    import comfy.sd

    device = comfy.model_management.get_torch_device()
    grids, runs = [(1, 4, 4)][:references], (5, 3)[: references + 1]
    layout = SequenceLayout(text_runs=runs, references=tuple(grids), target=(1, 4, 6))
    model = load_transformer(model_folder, device=device, dtype=torch.float32, progress=False)
    load = Workload(model, [layout])
    expected = model(**load.arguments(0, load.latents, 0.7))[0][:, -24:]

    patcher = comfy.sd.load_diffusion_model(
        str(transformer_file), model_options={"dtype": torch.float32}
    )
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    prompt = load.prompts[0]
    words = ~load.masks[0][0, : prompt.shape[1]]
    made = patcher.model.diffusion_model(
        load.latents.transpose(1, 2).unflatten(2, (4, 6)),
        torch.full((1,), 0.7, device=device),
        prompt[:, words],
        ref_latents=[load.references.transpose(1, 2).unflatten(2, (4, 4))] if references else None,
        image_slots=[runs[0]] if references else None,
    )
    assert_near(made.flatten(2).transpose(1, 2), expected)


@pytest.mark.comfyui
@torch.no_grad()
def test_comfyuis_vae_computes_the_same(native, small_vae, vae_file):
    import comfy.latent_formats
    import comfy.sd
    import comfy.utils

    state = comfy.utils.load_torch_file(str(vae_file))
    names = set(state)
    vae = comfy.sd.VAE(sd=state, dtype=torch.float32)
    assert set(vae.first_stage_model.state_dict()) == names
    form = comfy.latent_formats.QwenImage21()
    made = form.process_in(vae.encode(pixels()[:, :, 0].movedim(1, -1) / 2 + 0.5))
    assert_near(made.cpu(), normalised(small_vae, pixels())[:, :, 0])
    picture = vae.decode(form.process_out(latents()[:, :, 0])).cpu()
    assert_near(picture, decoded(small_vae, latents())[:, :, 0].movedim(1, -1) / 2 + 0.5)
