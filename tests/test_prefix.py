"""Persistent buffers: sizes, addresses, and the two arrangements."""

import pytest
import torch

from graph_cache.prefix import PrefixBuffers, PrefixShape, preferred_arrangements

SHAPE = PrefixShape(layers=3, batch=2, prefix=5, target=4, heads=2, head_dim=8, dtype=torch.float32)
BOTH = pytest.mark.parametrize("arrangement", ["per_layer", "shared"])


def storages(buffers: PrefixBuffers) -> dict[int, int]:
    found = {}
    for layer in range(SHAPE.layers):
        for tensor in (*buffers.prefix(layer), *buffers.target(layer), *buffers.joined(layer)):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@BOTH
def test_predicted_bytes_are_the_allocated_ones(arrangement):
    buffers = PrefixBuffers(SHAPE, torch.device("cpu"), arrangement)
    assert sum(storages(buffers).values()) == buffers.nbytes == SHAPE.nbytes(arrangement)


def test_bytes_of_the_7b_model():
    shape = PrefixShape(
        layers=32, batch=1, prefix=4196, target=4096, heads=32, head_dim=128, dtype=torch.bfloat16
    )
    # 0.5 MiB a token; the shared arrangement needs one layer's room for the target.
    assert shape.nbytes("per_layer") == (4196 + 4096) * 2**19
    assert shape.nbytes("shared") == 4196 * 2**19 + (4196 + 4096) * 2**14


@BOTH
def test_each_layer_reads_its_own_prefix_and_the_newest_target(arrangement):
    buffers = PrefixBuffers(SHAPE, torch.device("cpu"), arrangement)
    addresses = storages(buffers)
    prefixes = [(torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)) for _ in range(SHAPE.layers)]
    for layer, (key, value) in enumerate(prefixes):
        buffers.store(layer, key, value)
    for step in range(2):
        for layer, (key, value) in enumerate(prefixes):
            new_key = torch.full((2, 4, 2, 8), 10.0 * layer + step)
            buffers.target(layer)[0].copy_(new_key)
            buffers.target(layer)[1].copy_(-new_key)
            joined_key, joined_value = buffers.joined(layer)
            assert torch.equal(joined_key, torch.cat([key, new_key], dim=1))
            assert torch.equal(joined_value, torch.cat([value, -new_key], dim=1))
            assert joined_key.is_contiguous()
    assert storages(buffers) == addresses


@BOTH
@pytest.mark.parametrize("bad", [torch.zeros(1, 5, 2, 8), torch.zeros(2, 5, 2, 8).double()])
def test_a_prefix_that_does_not_fit_is_refused(arrangement, bad):
    buffers = PrefixBuffers(SHAPE, torch.device("cpu"), arrangement)
    with pytest.raises(ValueError, match="layer 1: prefix K/V"):
        buffers.store(1, bad, bad)


def test_buffers_made_in_inference_mode_can_be_written_outside_it():
    with torch.inference_mode():
        buffers = PrefixBuffers(SHAPE, torch.device("cpu"), "shared")
    buffers.target(0)[0].zero_()


def test_a_short_prefix_shares_room_for_the_target():
    def shape(prefix: int) -> PrefixShape:
        return PrefixShape(32, 1, prefix, 4096, 32, 128, torch.bfloat16)

    assert preferred_arrangements(shape(100)) == ("shared",)
    assert preferred_arrangements(shape(4196)) == ("per_layer", "shared")
