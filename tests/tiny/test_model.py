"""The shipped folder: what it holds, what the pipeline makes of it, and how it is read."""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image

from examples.tiny.joint import Joint, Layout
from examples.tiny.models import CHANNELS, CONTEXT, GRID, TOKENS
from examples.tiny.prompts import SLOTS, VOCABULARY, prompt_ids, text_runs, write_tokenizer
from examples.tiny.scenes import SIDE, Background, Item, Scene, draw
from graph_cache.checkpoint import CheckpointError
from graph_cache.demo_pipeline import load_pipeline, load_small
from graph_cache.tiny import TOKENIZER, TinyProcessor, UnknownWordError, has_word_list

MOST_BYTES = 24 * 10**6
PAD = VOCABULARY["<|image_pad|>"]
TEXTS = {
    0: "two red circles on a blue striped background",
    1: "make the red circle green",
    3: "put the red circle of picture 1 and the black star of picture 2 into picture 3",
}


def _references(count: int) -> list[Image.Image]:
    colours = ("red", "black", "green")
    scenes = (Scene((Item("star", c, "large", (1, 1), 36),), Background("white")) for c in colours)
    return [Image.fromarray(draw(scene)) for scene in scenes][:count]


@pytest.fixture(scope="module")
def small(model_folder) -> QwenImage21Pipeline:
    pipe = load_small(model_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _picture(pipe: QwenImage21Pipeline, references: int) -> np.ndarray:
    image = pipe(
        TEXTS[references],
        image=_references(references) or None,
        height=SIDE,
        width=SIDE,
        output_resolution=SIDE,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(2),
    ).images[0]
    return np.asarray(image)


# --- the folder -------------------------------------------------------------------------------


def test_the_folder_is_small_enough_for_a_checkout(model_folder):
    assert sum(file.stat().st_size for file in model_folder.rglob("*")) <= MOST_BYTES


def test_the_folder_loads_as_the_real_classes(small):
    names = {name: type(part).__name__ for name, part in small.components.items()}
    assert names["transformer"] == "QwenImage21Transformer2DModel"
    assert names["vae"] == "AutoencoderKLQwenImage21"
    assert names["text_encoder"] == "Qwen3VLForConditionalGeneration"
    assert names["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert {small.transformer.dtype, small.vae.dtype, small.text_encoder.dtype} == {torch.float32}
    assert small.processor.vocabulary == VOCABULARY
    assert _picture(small, 0).shape == (SIDE, SIDE, 4)


@pytest.mark.parametrize("references", [0, 1])
def test_the_real_processor_gives_the_same_picture(references, small, model_folder):
    try:
        # Not an import: the tests on ComfyUI put a stand-in for torchvision into the process.
        importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("transformers' Qwen3VLProcessor needs torchvision, which is not installed")
    pipe = QwenImage21Pipeline.from_pretrained(
        model_folder, dtype=torch.float32, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.processor).__name__ == "Qwen3VLProcessor"
    assert np.array_equal(_picture(pipe, references), _picture(small, references))


def test_load_pipeline_takes_the_small_folders_way(model_folder):
    pipe, given = load_pipeline(model_folder, TEXTS[0], False, torch.device("cpu"))
    assert isinstance(pipe.processor, TinyProcessor)
    assert given == {"prompt": TEXTS[0]}


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("references", TEXTS)
def test_the_transformer_sees_the_ids_that_training_had(references, small):
    """The pipeline drops its template's system turn; a reference is 64 slots."""
    ids, seen = prompt_ids(TEXTS[references], references), []
    for token in ids:
        seen += [token] * (SLOTS if token == PAD else 1)
    embeds, mask, slots = small.encode_prompt(TEXTS[references], _references(references) or None)
    expected = torch.tensor(seen)
    assert mask is None
    assert torch.equal(slots[0], expected == PAD)
    words = small.text_encoder.model.language_model.embed_tokens.weight[expected]
    # What the text encoder makes of a reference is overwritten by the reference's latents.
    assert torch.equal(embeds[0, ~slots[0]], words[expected != PAD])


def test_no_prompt_is_a_prompt_that_training_had(small):
    embeds, _, _ = small.encode_prompt("")
    words = small.text_encoder.model.language_model.embed_tokens.weight
    assert torch.equal(embeds[0], words[torch.tensor(prompt_ids("", 0))])


# --- the transformer --------------------------------------------------------------------------


@pytest.mark.parametrize("references", TEXTS)
def test_the_forward_of_training_equals_the_models(references, small):
    layout = Layout(text_runs(prompt_ids(TEXTS[references], references)))
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    text = normal(1, sum(layout.runs), CONTEXT)
    pictures = normal(1, references, TOKENS, CHANNELS)
    target, sigma = normal(1, TOKENS, CHANNELS), torch.tensor([0.7])
    ours = Joint(small.transformer, compiled=False)(layout, text, pictures, target, sigma)
    rows, slots = [], []
    for run, part in zip(layout.runs, text.split(list(layout.runs), dim=1)):
        rows += [part, torch.zeros(1, SLOTS, CONTEXT)]
        slots += [False] * run + [True] * SLOTS
    theirs = small.transformer(
        hidden_states=torch.cat([pictures.flatten(1, 2), target], dim=1),
        # The target has its slots in the mask alone.
        encoder_hidden_states=torch.cat(rows[:-1], dim=1),
        timestep=sigma,
        img_shapes=[[(1, GRID, GRID)] * (references + 1)],
        img_mask=torch.tensor([slots]),
        return_dict=False,
    )[0][:, -TOKENS:]
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())


# --- the vocabulary ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "processor")
    return tmp_path


def _changed(folder, change) -> None:
    tokenizer = json.loads((folder / TOKENIZER).read_text())
    change(tokenizer["model"])
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))


def test_the_words_are_read_from_the_folder(folder):
    processor = TinyProcessor.from_folder(folder)
    assert processor.vocabulary == VOCABULARY
    words = ("two", "red", "circles", ".")
    assert processor.encode("Two RED circles.") == [VOCABULARY[word] for word in words]
    with pytest.raises(UnknownWordError, match="'hexagon'"):
        processor.encode("a red hexagon")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.update(type="BPE"), "a tokenizer of type BPE"),
        (lambda model: model.update(vocab=["a", "red"]), "no words by their numbers"),
        (lambda model: model["vocab"].update(red="9"), "no words by their numbers"),
        (lambda model: model["vocab"].pop("<|im_end|>"), "<|im_end|> is None, not 5"),
    ],
)
def test_another_tokenizer_is_refused_by_its_file(folder, change, message):
    _changed(folder, change)
    with pytest.raises(CheckpointError) as caught:
        TinyProcessor.from_folder(folder)
    assert str(folder / TOKENIZER) in str(caught.value)
    assert message in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path):
    assert not has_word_list(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        TinyProcessor.from_folder(tmp_path)


def test_a_folder_that_lacks_a_component(folder, model_folder):
    (folder / "model_index.json").write_text('{"_class_name": "QwenImage21Pipeline"}')
    (folder / "transformer").symlink_to(model_folder.resolve() / "transformer")
    with pytest.raises(FileNotFoundError, match="no vae in"):
        load_small(folder)
