"""The real Qwen-Image-2.1 pipeline classes with small random weights, made on the spot.

For the demonstration and the tests: transformer, VAE, scheduler, text encoder and pipeline are the
libraries' own classes, only their sizes are small. The weights know nothing, so the pictures are
noise, but a different noise for every prompt and reference. The processor is ours, since a real
one needs a vocabulary.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path as FilePath

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from PIL import Image
from transformers import BatchFeature, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from .checkpoint import CheckpointError, read_json

try:
    # Where there are two, the one that needs no torchvision.
    from transformers import Qwen2VLImageProcessorPil as Qwen2VLImageProcessor
except ImportError:
    from transformers import Qwen2VLImageProcessor

CONTEXT_WIDTH = 64
"""Channels of a prompt embedding of the small text encoder."""

SPECIAL_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL_TOKENS += ("<|im_start|>", "<|im_end|>")
"""Their ids are their places."""
TOKENIZER = FilePath("processor", "tokenizer.json")
"""Where a pipeline's folder has its tokenizer."""
_VOCABULARY = 1024


class UnknownWordError(ValueError):
    """A prompt holds a word that a small vocabulary has not."""


def pieces(text: str) -> list[str]:
    """Split a text into special tokens, words in lower case, punctuation marks and line ends."""
    return [piece.lower() for piece in re.findall(r"<\|\w+\|>|\w+|[^\w\s]|\n", text)]


def has_word_list(path: str | FilePath) -> bool:
    """Whether a pipeline's folder has a tokenizer that knows whole words, as small models do."""
    file = FilePath(path) / TOKENIZER
    model = read_json(file).get("model") if file.is_file() else None
    return isinstance(model, dict) and model.get("type") == "WordLevel"


class TinyProcessor:
    """Does what `Qwen3VLProcessor` does for the pipeline: a token a word.

    Pictures become patches through the real image processor.

    Parameters
    ----------
    vocabulary
        Ids by word; None: any word, hashed.
    """

    def __init__(self, vocabulary: Mapping[str, int] | None = None) -> None:
        self.tokenizer = self
        self.vocabulary = vocabulary
        # The pipeline has resized a picture to whole slots already.
        self._images = Qwen2VLImageProcessor(
            patch_size=16, temporal_patch_size=2, merge_size=2, do_resize=False
        )

    @classmethod
    def from_folder(cls, path: str | FilePath) -> TinyProcessor:
        """The processor of a small pipeline's folder, which is read without torchvision.

        Parameters
        ----------
        path
            Of the pipeline; its tokenizer must be a list of whole words in lower case.

        Raises
        ------
        FileNotFoundError
            If the folder has no tokenizer.
        CheckpointError
            If the tokenizer is of another kind.
        """
        file = FilePath(path) / TOKENIZER
        if not has_word_list(path):
            kind = read_json(file).get("model")
            kind = kind.get("type") if isinstance(kind, dict) else None
            raise CheckpointError(f"{file} is no list of words: a tokenizer of type {kind}")
        words = read_json(file)["model"].get("vocab")
        if not isinstance(words, dict) or not all(type(number) is int for number in words.values()):
            raise CheckpointError(f"{file} has no words by their numbers")
        for number, token in enumerate(SPECIAL_TOKENS):
            if words.get(token) != number:
                raise CheckpointError(f"{file}: {token} is {words.get(token)}, not {number}")
        return cls(words)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises
        ------
        UnknownWordError
            If there is a vocabulary and a word is not in it; it names all such words.
        """
        words = pieces(text)
        if self.vocabulary is None:
            first = len(SPECIAL_TOKENS)
            return [
                SPECIAL_TOKENS.index(word)
                if word in SPECIAL_TOKENS
                else first + zlib.crc32(word.encode()) % (_VOCABULARY - first)
                for word in words
            ]
        unknown = list(dict.fromkeys(word for word in words if word not in self.vocabulary))
        if unknown:
            known = ", ".join(word for word in self.vocabulary if word.isalnum())
            raise UnknownWordError(
                f"this small model does not know {', '.join(map(repr, unknown))}; "
                f"its words are: {known}"
            )
        return [self.vocabulary[word] for word in words]

    def apply_chat_template(self, messages: list[dict], **options: object) -> list[list[int]]:
        """Token ids of messages that hold text alone."""
        text = "".join(
            f"<|im_start|>{message['role']}\n{part['text']}<|im_end|>\n"
            for message in messages
            for part in message["content"]
        )
        return [self.encode(text)]

    def __call__(
        self, text: list[str], images: list[Image.Image] | None = None, **options: object
    ) -> BatchFeature:
        """Ids, attention mask and patches of prompts, padded on the left."""
        features: dict[str, torch.Tensor] = {}
        slots: list[int] = []
        if images is not None:
            features = dict(self._images(images=images, return_tensors="pt"))
            slots = [int(grid.prod()) // 4 for grid in features["image_grid_thw"]]
        rows, image = [], 0
        for prompt in text:
            row: list[int] = []
            for token in self.encode(prompt):
                count = 1
                if token == 0:
                    count, image = slots[image], image + 1
                row += [token] * count
            rows.append(row)
        longest = max(map(len, rows))
        ids = torch.tensor([[1] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        features |= {"input_ids": ids, "attention_mask": mask}
        features["mm_token_type_ids"] = (ids == 0).int()
        return BatchFeature(features)


def _text_encoder() -> Qwen3VLForConditionalGeneration:
    """A small Qwen3-VL of the real class."""
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                "vocab_size": _VOCABULARY,
                "hidden_size": CONTEXT_WIDTH,
                "intermediate_size": 2 * CONTEXT_WIDTH,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 16,
                "out_hidden_size": CONTEXT_WIDTH,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=0,
            video_token_id=1,
            vision_start_token_id=2,
            vision_end_token_id=3,
        )
    )


def random_weights(module: torch.nn.Module, seed: int) -> None:
    """Fill a module with weights that neither vanish nor explode over its depth.

    Matrices are normal with standard deviation ``1 / sqrt(inputs)``, biases normal around 0, and
    norms' scales normal around what the module was made with. The same seed gives the same weights.
    """
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.numel() > len(parameter):
                inputs = parameter[0].numel()
                parameter.normal_(0, 1 / math.sqrt(inputs), generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=generator)


def _settle(module: torch.nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Make a model ready for use."""
    # As `from_pretrained` does: weights in the dtype asked for, tables of frequencies in float32.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.to(device)
    module.eval().requires_grad_(False)


def tiny_transformer(
    *,
    layers: int = 3,
    heads: int = 2,
    mlp_ratio: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> QwenImage21Transformer2DModel:
    """A small transformer of the real class, head_dim 128 and 64 latent channels as in the 7 B."""
    model = QwenImage21Transformer2DModel(
        num_layers=layers,
        num_attention_heads=heads,
        context_in_dim=CONTEXT_WIDTH,
        mlp_ratio=mlp_ratio,
    )
    random_weights(model, seed)
    _settle(model, dtype, device)
    return model


def tiny_pipeline(
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **sizes: int,
) -> QwenImage21Pipeline:
    """The unmodified pipeline with small models.

    Parameters
    ----------
    dtype, device
        Of all weights.
    seed
        Of the random weights.
    sizes
        Of the transformer, see `tiny_transformer`.
    """
    vae = AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, num_res_blocks=1)
    text_encoder = _text_encoder()
    for offset, module in enumerate((vae, text_encoder), start=1):
        random_weights(module, seed + offset)
        _settle(module, dtype, device)
    pipe = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        processor=TinyProcessor(),
        transformer=tiny_transformer(dtype=dtype, device=device, seed=seed, **sizes),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
