"""The small models: the real classes of Qwen-Image-2.1, their sizes, and their folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from graph_cache.tiny import TinyProcessor, random_weights

from .prompts import VOCABULARY, write_tokenizer

CONTEXT = 128
"""Channels of a token of the prompt."""
CHANNELS = 64
GRID = 16
"""Latent tokens along a side of a picture."""
TOKENS = GRID * GRID
SHIFT = 5.0
"""Of the scheduler's levels: a grid of 16 x 16 x 64 numbers is seen through a lot of noise."""


def shifted(sigma: torch.Tensor) -> torch.Tensor:
    """Levels in 0..1 as the scheduler shifts them (`FlowMatchEulerDiscreteScheduler.shift`)."""
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


def make_vae() -> AutoencoderKLQwenImage21:
    """The VAE: 4 channels (RGBA) to 64 at a sixteenth of the side; 1.4 M parameters."""
    return AutoencoderKLQwenImage21(
        base_dim=16,
        decoder_base_dim=16,
        dim_mult=[1, 2, 4, 4, 4],
        num_res_blocks=1,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )


def make_transformer(
    layers: int = 6, heads: int = 3, mlp_ratio: int = 2
) -> QwenImage21Transformer2DModel:
    """The transformer with weights to begin with; 10 M parameters."""
    model = QwenImage21Transformer2DModel(
        num_layers=layers,
        num_attention_heads=heads,
        context_in_dim=CONTEXT,
        mlp_ratio=mlp_ratio,
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.xavier_uniform_(parameter)
    # A step begins as the identity: what a block adds is scaled by gates that begin closed, and
    # the output begins at nothing.
    torch.nn.init.zeros_(model.modulation[1].weight)
    torch.nn.init.zeros_(model.norm_out.linear.weight)
    torch.nn.init.zeros_(model.proj_out.weight)
    return model


def make_text_encoder(embedding: torch.Tensor) -> Qwen3VLForConditionalGeneration:
    """The text encoder that looks a token up and nothing else.

    Parameters
    ----------
    embedding
        ``(len(VOCABULARY), CONTEXT)``, learned with the transformer. The one decoder layer of the
        real class adds nothing to it, since its output projections are zero: the transformer's own
        causal text does the reading.
    """
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                "vocab_size": len(VOCABULARY),
                "hidden_size": CONTEXT,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
                "tie_word_embeddings": True,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 1,
                "patch_size": 16,
                "out_hidden_size": CONTEXT,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=0,
            video_token_id=1,
            vision_start_token_id=2,
            vision_end_token_id=3,
            tie_word_embeddings=True,
        )
    )
    random_weights(model, 0)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight.copy_(embedding)
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # What it sees of a reference is overwritten by the reference's latents.
        for parameter in model.model.visual.merger.parameters():
            parameter.zero_()
    return model.eval()


def make_pipeline(
    vae: AutoencoderKLQwenImage21,
    transformer: QwenImage21Transformer2DModel,
    embedding: torch.Tensor,
) -> QwenImage21Pipeline:
    """The unmodified pipeline around the small models."""
    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=make_text_encoder(embedding),
        processor=TinyProcessor(VOCABULARY),
        transformer=transformer,
    )


def save_pipeline(
    folder: Path,
    vae: AutoencoderKLQwenImage21,
    transformer: QwenImage21Transformer2DModel,
    embedding: torch.Tensor,
) -> None:
    """Write a folder that `QwenImage21Pipeline.from_pretrained` reads, in 16-bit safetensors.

    Parameters
    ----------
    folder
        Made if it is not there; files of the same names are overwritten.
    embedding
        ``(len(VOCABULARY), CONTEXT)``.
    """
    parts = {
        # Its own range of values: bfloat16 would show in flat areas.
        "vae": (vae, torch.float16),
        "transformer": (transformer, torch.bfloat16),
        "text_encoder": (make_text_encoder(embedding), torch.bfloat16),
    }
    for name, (module, dtype) in parts.items():
        before = {key: value.detach().clone() for key, value in module.state_dict().items()}
        module.to(dtype).save_pretrained(folder / name)
        module.float().load_state_dict(before)
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    write_tokenizer(folder / "processor")
    index = {
        "_class_name": "QwenImage21Pipeline",
        "_diffusers_version": "0.42.1",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "sample_sigmas": None,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
