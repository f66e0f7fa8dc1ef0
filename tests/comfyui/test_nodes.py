"""The nodes as ComfyUI loads and calls them, without a server."""

import json
from types import SimpleNamespace

import comfy_env
import pytest
import torch
from helpers import TEXT, counters_add_up

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def pack():
    return comfy_env.load_pack()


@pytest.fixture
def node(pack):
    """A node class, with the id that ComfyUI would give it."""

    def find(name, unique_id="1"):
        cls = pack[1][name]
        cls.hidden = SimpleNamespace(unique_id=unique_id)
        return cls

    return find


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A models folder of ComfyUI's with a pipeline in it, as diffusers saves one."""
    import folder_paths

    from graph_cache.tiny import tiny_transformer

    def folders(kind):
        return [str(tmp_path)] if kind == "diffusers" else []

    monkeypatch.setattr(folder_paths, "get_folder_paths", folders)
    pipeline = tmp_path / "Qwen-Image-2.1"
    tiny_transformer().save_pretrained(pipeline / "transformer", max_shard_size="2MB")
    (pipeline / "model_index.json").write_text("{}")
    return pipeline


def test_four_nodes_in_one_category(pack):
    _, nodes = pack
    assert len(nodes) == 4
    for cls in nodes.values():
        schema = cls.define_schema()
        assert schema.category == "model/qwen image 2.1"
        assert all(field.tooltip for field in schema.inputs), schema.node_id


def test_every_input_is_translated(pack):
    _, nodes = pack
    file = comfy_env.REPOSITORY / "locales" / "zh" / "nodeDefs.json"
    texts = json.loads(file.read_text(encoding="utf-8"))
    assert set(texts) == set(nodes)
    for name, cls in nodes.items():
        schema = cls.define_schema()
        assert set(texts[name]["inputs"]) == {field.id for field in schema.inputs}
        assert set(texts[name]["outputs"]) == {str(i) for i in range(len(schema.outputs))}
        assert all(text["tooltip"] for text in texts[name]["inputs"].values())


def test_the_patch_node_patches_a_clone(node, bench):
    (patched,) = node("QwenImage21GraphCache").execute("buffers", bench.patcher).args
    assert patched is not bench.patcher
    assert torch.equal(bench.sample(patched), bench.sample())


def test_the_sampler_samples_and_tells(node, bench):
    from workbench import prompt

    job = {"positive": prompt(1, references=1), "negative": prompt(2)}
    latent = {"samples": torch.zeros(1, 64, 6, 4)}
    sampler = node("QwenImage21GraphSampler")
    with torch.inference_mode():
        out, status = sampler.execute(
            bench.patcher, 1, 5, 1.0, "euler", "simple", *job.values(), latent, mode="buffers"
        ).args
    assert torch.equal(out["samples"], bench.sample(**job))
    report = json.loads(status)
    assert report["counts"] == {"prefill": 1, "captured": 0, "replayed": 0, "eager": 4}
    assert report["adapter"] == "comfyui"
    shown = node("QwenImage21GraphStatus").execute(status)
    assert "mode buffers, path buffers: 1 prefill, 4 eager" in shown.args[0]
    assert shown.ui is not None


def test_a_status_alone_shows_the_last_run(node, bench):
    from workbench import prompt

    status = node("QwenImage21GraphStatus")
    (patched,) = node("QwenImage21GraphCache").execute("off", bench.patcher).args
    bench.sample(patched, positive=prompt(1))
    assert "mode off" in status.execute().args[0]
    assert "off: Mode is 'off'" in status.execute().args[0]
    # It is never up to date, so that ComfyUI runs it again.
    assert status.fingerprint_inputs() != status.fingerprint_inputs()


def test_a_status_shows_any_text(node):
    assert node("QwenImage21GraphStatus").execute("no report").args[0] == "no report"
    assert node("QwenImage21GraphStatus").execute("[1]").args[0] == "[1]"


def test_another_model_is_sampled_unchanged(node, bench):
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2)))
    (passed,) = node("QwenImage21GraphCache").execute("auto", other).args
    assert passed is other


# --- the loader -------------------------------------------------------------------------------


def test_the_loader_lists_pipelines_and_transformer_folders(node, folder):
    def listed():
        loader = node("QwenImage21DiffusersLoader")
        return next(f.options for f in loader.define_schema().inputs if f.id == "folder")

    assert listed() == ["Qwen-Image-2.1"]
    (folder / "transformer").rename(folder.parent / "alone")
    assert listed() == ["alone"]


def test_a_comfyui_without_the_model_says_so(node, folder):
    if comfy_env.has_native_model():
        pytest.skip("needs a ComfyUI without Qwen-Image-2.1; this one has it")
    from_folder = node("QwenImage21DiffusersLoader").execute
    with pytest.raises(ValueError, match=r"Qwen-Image-2.1/? is in order, .* update ComfyUI"):
        from_folder("Qwen-Image-2.1")


@pytest.mark.parametrize("harm", ["truncated", "missing shard", "another model", "no folder"])
def test_a_harmed_folder_is_named(node, folder, harm):
    transformer = folder / "transformer"
    shard = sorted(transformer.glob("*.safetensors"))[1]
    named, what = shard.name, "damaged"
    if harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif harm == "missing shard":
        shard.unlink()
        what = "missing"
    elif harm == "another model":
        config = json.loads((transformer / "config.json").read_text())
        config["_class_name"] = "FluxTransformer2DModel"
        (transformer / "config.json").write_text(json.dumps(config))
        named, what = "config.json", "FluxTransformer2DModel"
    name = "elsewhere" if harm == "no folder" else "Qwen-Image-2.1"
    if harm == "no folder":
        named, what = "elsewhere", "no folder"
    with pytest.raises((ValueError, FileNotFoundError), match=what) as raised:
        node("QwenImage21DiffusersLoader").execute(name)
    assert named in str(raised.value)


@pytest.mark.comfyui
def test_a_diffusers_folder_becomes_the_native_model(node, folder):
    """The weights come out where they belong: the native model computes what diffusers' does."""
    from graph_cache.tiny import tiny_transformer
    from graph_cache.workload import Workload

    (model,) = node("QwenImage21DiffusersLoader").execute("Qwen-Image-2.1").args
    work = Workload(tiny_transformer(), [TEXT])
    latents = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        arguments = work.arguments(0, latents, 0.5)
        theirs = work.model(**arguments)[0][:, -24:]
        ours = model.model.diffusion_model(
            latents.transpose(1, 2).reshape(1, 64, 4, 6),
            torch.tensor([0.5]),
            arguments["encoder_hidden_states"],
        )
    torch.testing.assert_close(ours.flatten(2).transpose(1, 2), theirs, rtol=1e-3, atol=1e-4)
    again = model.cached_patcher_init[0](*model.cached_patcher_init[1], disable_dynamic=True)
    assert again.model is not model.model


@pytest.mark.comfyui
def test_a_loaded_model_is_accelerated(node, folder):
    from workbench import Workbench

    bench = Workbench("native")
    (bench.patcher,) = node("QwenImage21DiffusersLoader").execute("Qwen-Image-2.1").args
    positive = [[torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1)), {}]]
    ours, _ = bench.patch(mode="buffers")
    job = {"positive": positive, "negative": positive}
    assert torch.equal(bench.sample(ours, **job), bench.sample(**job))
    assert counters_add_up(bench.report, 5)
