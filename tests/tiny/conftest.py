"""The small model, for the tests that are about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples.tiny.models import CHANNELS, CONTEXT, make_transformer, make_vae, save_pipeline
from examples.tiny.prompts import VOCABULARY
from graph_cache.tiny import random_weights

_SHIPPED = Path(__file__).parents[2] / "examples" / "tiny" / "model"
_INSTEAD = os.environ.get("TINY_MODEL")


def _is_there(folder: Path) -> bool:
    return (folder / "model_index.json").is_file()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """The folder of the checkout; that in TINY_MODEL; or one of the same sizes, untrained."""
    if _INSTEAD:
        return Path(_INSTEAD)
    if _is_there(_SHIPPED):
        return _SHIPPED
    folder = tmp_path_factory.mktemp("untrained")
    vae, transformer = make_vae(), make_transformer()
    for module in (vae, transformer):
        random_weights(module, 0)
    vae.register_to_config(latents_mean=[0.0] * CHANNELS, latents_std=[3.0] * CHANNELS)
    words = torch.randn(len(VOCABULARY), CONTEXT, generator=torch.Generator().manual_seed(0))
    save_pipeline(folder, vae, transformer.eval(), words)
    return folder


@pytest.fixture
def trained() -> None:
    """For tests of what the weights know."""
    if _INSTEAD or not _is_there(_SHIPPED):
        pytest.skip(f"needs a trained model in {_SHIPPED.relative_to(_SHIPPED.parents[2])}")
