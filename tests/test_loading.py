"""Loading: every layout of files, and one clear error for everything that can be wrong."""

import json
import re
import shutil

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from helpers import TEXT, same
from safetensors.torch import load_file, save_file

from graph_cache.checkpoint import expected_shapes
from graph_cache.loading import CheckpointError, load_transformer
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A transformer as diffusers saves it: configuration and one file."""
    path = tmp_path_factory.mktemp("model") / "transformer"
    tiny_transformer().save_pretrained(path)
    return path


@pytest.fixture
def weights(folder):
    return load_file(folder / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        return Workload(tiny_transformer(), [TEXT]).run(3).outputs


def comfyui(weights, prefix=""):
    """The same weights under ComfyUI's names: gate and projection in one tensor."""
    renamed = {}
    for name, value in weights.items():
        if name.endswith("img_mlp.gate_layer.weight"):
            proj = weights[name.replace("gate_layer", "proj")]
            fused = name.replace("gate_layer", "gate_up")
            renamed[prefix + fused] = torch.cat([value, proj])
        elif not name.endswith("img_mlp.proj.weight"):
            renamed[prefix + name] = value
    return renamed


def outputs(model):
    return Workload(model, [TEXT]).run(3).outputs


def test_a_diffusers_folder(folder, expected):
    model = load_transformer(folder, progress=False)
    assert same(outputs(model), expected)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_pipeline_folder(folder, tmp_path, expected):
    shutil.copytree(folder, tmp_path / "transformer")
    assert same(outputs(load_transformer(str(tmp_path), progress=False)), expected)


def test_sharded_weights(tmp_path, expected):
    tiny_transformer().save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(outputs(load_transformer(tmp_path, progress=False)), expected)


def test_one_file_with_diffusers_names(folder, expected):
    file = folder / "diffusion_pytorch_model.safetensors"
    model = load_transformer(file, progress=False)
    assert same(outputs(model), expected)
    assert dict(model.config)["num_layers"] == 3


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_one_file_with_comfyui_names(prefix, weights, tmp_path, expected):
    save_file(comfyui(weights, prefix), tmp_path / "native.safetensors")
    model = load_transformer(tmp_path / "native.safetensors", progress=False)
    assert same(outputs(model), expected)


def test_conversion_of_the_dtype(folder):
    model = load_transformer(folder, dtype=torch.bfloat16, progress=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    theirs = QwenImage21Transformer2DModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert same(outputs(model), outputs(theirs))


def test_progress_is_shown(folder, capsys):
    load_transformer(folder)
    assert "Loading weights" in capsys.readouterr().err


# --- what can be wrong ------------------------------------------------------------------------


def written(weights, tmp_path, name="model.safetensors"):
    save_file(weights, tmp_path / name)
    return tmp_path / name


def broken(weights, name):
    """Weights with one thing wrong, by the name of the case."""
    if name == "missing":
        return {key: value for key, value in weights.items() if not key.endswith("norm_q.weight")}
    if name == "unknown":
        return weights | {"transformer_blocks.0.attn.add_q.weight": torch.zeros(2, 2)}
    if name == "misshapen":
        return weights | {"transformer_blocks.1.attn.to_k.weight": torch.zeros(256, 128)}
    if name == "no layers":
        return {key: value for key, value in weights.items() if "blocks" not in key}
    if name == "another model":
        return {"conv_in.weight": torch.zeros(4, 4), "mid_block.norm.bias": torch.zeros(3)}
    if name == "odd width":
        return weights | {"img_in.weight": torch.zeros(250, 64)}
    assert name == "quantised"
    return weights | {"transformer_blocks.0.attn.to_q.weight_scale": torch.ones(1)}


MESSAGES = {
    "missing": r"lacks 3 tensors: transformer_blocks\.0\.attn\.norm_q\.weight, ",
    "unknown": r"holds 1 unknown tensors: transformer_blocks\.0\.attn\.add_q\.weight",
    "misshapen": r"holds 1 tensors of another shape: transformer_blocks\.1\.attn\.to_k\.weight in "
    r"model\.safetensors is \[256, 128\], not \[256, 256\]",
    "no layers": r"is not a Qwen-Image-2\.1 transformer",
    "another model": r"is not a Qwen-Image-2\.1 transformer: it holds conv_in\.weight, mid_block",
    "odd width": r"a width of 250 and",
    "quantised": r"is quantised \(transformer_blocks\.0\.attn\.to_q\.weight_scale\)",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_contents(name, weights, tmp_path):
    file = written(broken(weights, name), tmp_path)
    with pytest.raises(CheckpointError, match=MESSAGES[name]) as error:
        load_transformer(file, progress=False)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_layer_is_not_taken_for_a_smaller_model(weights, tmp_path):
    del_middle = {key: value for key, value in weights.items() if "blocks.1." not in key}
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors: transformer_blocks\.1\."):
        load_transformer(written(del_middle, tmp_path), progress=False)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.999])
def test_truncated_files(keep, folder, tmp_path):
    data = (folder / "diffusion_pytorch_model.safetensors").read_bytes()
    file = tmp_path / "short.safetensors"
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"short\.safetensors is damaged"):
        load_transformer(file, progress=False)


def test_a_missing_shard(tmp_path):
    tiny_transformer().save_pretrained(tmp_path, max_shard_size="2MB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {re.escape(shard.name)}, which is missing"):
        load_transformer(tmp_path, progress=False)


def test_a_key_in_two_shards(tmp_path, weights):
    tiny_transformer().save_pretrained(tmp_path, max_shard_size="2MB")
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    again = "img_in.weight"
    save_file(load_file(last) | {again: weights[again]}, last)
    with pytest.raises(CheckpointError, match=r"holds img_in\.weight again"):
        load_transformer(tmp_path, progress=False)


def test_wrong_folders(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder at"):
        load_transformer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        load_transformer(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(CheckpointError, match="of a UNet2DConditionModel, not a QwenImage21"):
        load_transformer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_transformer(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file in"):
        load_transformer(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is not a \.safetensors file"):
        load_transformer(tmp_path / "weights.bin")


def test_nothing_is_read_before_everything_is_checked(weights, tmp_path, monkeypatch):
    """A file that is wrong in its last key: no tensor may have been loaded by then."""
    from graph_cache import loading

    file = written(broken(weights, "missing"), tmp_path)
    monkeypatch.setattr(loading, "_fill", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError):
        load_transformer(file, progress=False)


def test_the_configuration_is_used(folder, tmp_path):
    """A folder whose weights do not fit its own configuration."""
    shutil.copytree(folder, tmp_path / "transformer")
    config = json.loads((folder / "config.json").read_text()) | {"num_layers": 4}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors: transformer_blocks\.3\."):
        load_transformer(tmp_path, progress=False)


def test_what_is_expected_is_what_the_model_has():
    model = tiny_transformer()
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert expected_shapes(model.config) == wanted
