"""What a node may be asked for."""

import pytest

from graph_cache.models.comfyui import Options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "fast"}, "mode"),
        ({"verify": True}, "verify"),
        ({"max_vram_gb": -1.0}, "max_vram_gb"),
        ({"min_steps": -3}, "min_steps"),
    ],
)
def test_bad_values_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Options(**options)


def test_no_limit_is_zero():
    assert Options().max_bytes is None
    assert Options(max_vram_gb=0.5).max_bytes == 2**29
