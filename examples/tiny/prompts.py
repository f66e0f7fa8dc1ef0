"""Prompts as token ids: the vocabulary, and what `QwenImage21Pipeline` makes of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

from graph_cache.tiny import SPECIAL_TOKENS, pieces

from .words import WORDS

SYSTEM = "Comprehend and analyze the provided prompt."
SLOTS = 64
"""Vision-language slots of a 256 x 256 reference: one for 2 x 2 latent tokens of 16 pixels."""

_REFERENCE = "<image{}><|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def make_vocabulary() -> dict[str, int]:
    """Every token by its id: special ones, the words of the grammar, those of the template."""
    template = pieces(f"<|im_start|>system\n{SYSTEM}" + _TEMPLATE)
    template += [f"image{number}" for number in range(1, 11)] + ["<", ">"]
    words = sorted({word.lower() for word in WORDS} | set(template) - set(SPECIAL_TOKENS))
    return {token: index for index, token in enumerate((*SPECIAL_TOKENS, *words))}


VOCABULARY = make_vocabulary()


def prompt_ids(text: str, references: int) -> list[int]:
    """Token ids that the transformer sees of a prompt.

    Parameters
    ----------
    text
        Caption or instruction; words in `VOCABULARY` only.
    references
        Number of 256 x 256 references.

    Returns
    -------
    list of int
        The pipeline's template without its system turn; a reference is one ``<|image_pad|>``,
        where the pipeline has `SLOTS` of them.
    """
    shown = " ".join(_REFERENCE.format(number) for number in range(1, references + 1))
    tokens = pieces(_TEMPLATE.format(shown + (text or " ")))
    return [VOCABULARY[token] for token in tokens]


def text_runs(ids: list[int]) -> tuple[int, ...]:
    """Lengths of the text before each reference and before the target."""
    pad = VOCABULARY["<|image_pad|>"]
    runs = [0]
    for token in ids:
        if token == pad:
            runs.append(0)
        else:
            runs[-1] += 1
    return tuple(runs)


def write_tokenizer(folder: Path) -> None:
    """Write the processor's files, as `transformers.Qwen3VLProcessor.from_pretrained` reads them.

    Parameters
    ----------
    folder
        Of the processor; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"\w+|[^\w\s]|\n"},
            "behavior": "Removed",
            "invert": True,
        },
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unknown>"},
    }
    turn = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    images = {
        "do_resize": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|video_pad|>",
            "eos_token": "<|im_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **images},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            **images,
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(turn)
