"""What needs a process of its own: another allocator, a failed capture, an account of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALLOCATORS = pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])


def run(*command: str, allocator: str) -> str:
    """A python process with an allocator; its output."""
    environment = dict(os.environ)
    environment["PYTORCH_CUDA_ALLOC_CONF"] = f"backend:{allocator}"
    path = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def script(name: str, *arguments: str, allocator: str) -> dict:
    output = run(str(HERE / "scripts" / name), *arguments, allocator=allocator)
    return json.loads(output.splitlines()[-1])


def test_all_graph_tests_with_cudamallocasync():
    """ComfyUI's default, where plain torch uses its own; stale addresses show in one of them."""
    output = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_graphs.py")),
        allocator="cudaMallocAsync",
    )
    assert " passed" in output
    assert " skipped" not in output


@ALLOCATORS
def test_a_capture_that_fails_half_way_fails_alone(allocator):
    """Tensors of the failed capture are alive in its frames when the error is raised."""
    seen = script("fails_half_way.py", allocator=allocator)
    assert seen["equal"] == [True, True]
    assert seen["eager"] == {"warm_up": 1, "capture_failed": 5}
    assert "this kernel cannot be captured" in seen["sentence"]
    if allocator == "native":
        assert seen["afterwards"]["captured"] == 1
        assert seen["eager afterwards"] == {"warm_up": 1}
    else:
        # torch cannot capture in such a process any more, and nothing tries.
        assert seen["eager afterwards"] == {"capture_failed": 6}


@ALLOCATORS
@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
def test_memory_comes_back(arrangement, allocator):
    seen = script("memory_cycle.py", arrangement, allocator=allocator)
    # The first attention of the process is ours: torch settles its settings then.
    assert seen["eager at first"] == {"warm_up": 1}
    held = seen["held"]
    assert held["buffers"] > 32
    assert held["graphs"] > 64
    # The account is about what the device has lost, and everything comes back.
    assert abs(seen["taken"] - held["buffers"] - held["graphs"]) < 64
    assert abs(seen["taken without graphs"] - held["buffers"]) < 64
    assert seen["kept"] < 32
    assert seen["alive"] == [False]
