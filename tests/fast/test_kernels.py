"""A fast step's elementwise operations against float64: torch's, and the Triton kernels."""

import os
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch

from graph_cache.fast import ops

SCRIPT = Path(kernel_cases.__file__)
DTYPES = pytest.mark.parametrize("dtype", kernel_cases.BOUND, ids=str)
SIZES = pytest.mark.parametrize("size", kernel_cases.SHAPES)


NEEDS_TRITON = pytest.mark.skipif(
    not ops.has_triton(), reason="needs Triton, which is not installed"
)


@DTYPES
@SIZES
def test_torch_operations(dtype, size):
    kernel_cases.check_torch(dtype, kernel_cases.SHAPES[size], "cpu")


def test_torch_operations_keep_to_float16():
    kernel_cases.check_float16_range(ops.TorchOps(), "cpu")


@NEEDS_TRITON
def test_triton_kernels_in_its_interpreter():
    # A process of its own: Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "cpu"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all kernels are right" in done.stdout


def test_a_wrong_operation_is_noticed():
    class Forgetful(ops.TorchOps):
        def gate_norm(self, x, y, gate, scale, eps):
            return super().gate_norm(x, y, gate.abs(), scale, eps)

    with pytest.raises(AssertionError, match="norm of a sum"):
        kernel_cases.check(Forgetful(), torch.float32, (1, 4, 2, 64), "cpu", 1e-5)


@NEEDS_TRITON
@pytest.mark.parametrize(("width", "head_dim"), [(32768, 128), (4096, 96), (16, 8)])
def test_sizes_that_the_kernels_are_not_made_for(width, head_dim):
    from graph_cache.fast.triton_ops import fits

    assert not fits(width, head_dim)


def test_without_a_gpu_it_is_torch():
    assert ops.choose_ops(torch.device("cpu"), torch.float32, 4096, 128).name == "torch"


def test_a_gpu_without_triton_has_no_operations(monkeypatch):
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    found = ops.choose_ops(torch.device("cuda", 0), torch.bfloat16, 4096, 128)
    assert found == "Triton is not installed"


@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["CalledProcessError", "PTXASError", "OSError", "AssertionError"])
def test_whatever_triton_raises_says_why_it_is_unusable(kind, monkeypatch):
    from triton.runtime.errors import PTXASError

    from graph_cache.fast import triton_ops

    errors = {
        "CalledProcessError": subprocess.CalledProcessError(1, ["gcc"]),
        "PTXASError": PTXASError("no such chip"),
        "OSError": OSError("read-only cache"),
        "AssertionError": AssertionError("libcuda.so cannot be found"),
    }

    class Broken:
        def __getitem__(self, grid):
            def launch(*_, **__):
                raise errors[kind]

            return launch

    monkeypatch.setattr(triton_ops, "norm_kernel", Broken())
    triton_ops.why_unusable.cache_clear()
    why = triton_ops.why_unusable(torch.device("cpu"), torch.float32, 64, 32)
    triton_ops.why_unusable.cache_clear()
    assert str(errors[kind]).splitlines()[0] in why
