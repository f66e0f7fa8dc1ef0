"""The pack as ComfyUI and pip see it, and the rules of the house that a machine can check."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for d in ("graph_cache", "nodes") for p in (ROOT / d).rglob("*.py"))


def load_pack():
    """Load the pack the way ComfyUI does: by its folder, under a name made from the path."""
    spec = importlib.util.spec_from_file_location(
        "pack_under_test", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["pack_under_test"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["pack_under_test"]
    return module


def test_the_pack_loads_without_comfyui():
    pack = load_pack()
    assert (ROOT / pack.WEB_DIRECTORY).is_dir()
    assert callable(pack.comfy_entrypoint)


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # ComfyUI loads the pack under a name of its own, so inside it imports are relative.
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_go_one_way(path):
    names = imported(path)
    tops = {name.partition(".")[0] for name in names}
    never = {"pickle", "subprocess", "urllib", "requests", "socket"}
    if path.name == "triton_ops.py":
        # For the name of what Triton's compiler raises.
        never -= {"subprocess"}
    assert not tops & never
    if path.is_relative_to(ROOT / "graph_cache"):
        assert "nodes" not in tops
        if path != ROOT / "graph_cache" / "models" / "comfyui" / "core.py":
            assert not tops & {"comfy", "comfy_aimdo", "comfy_api", "comfy_execution", "server"}
    # Policy does not know a model library: only adapters and the commands do.
    commands = {"demo.py", "demo_pipeline.py", "bench.py", "tiny.py", "workload.py", "loading.py"}
    commands |= {"ceiling.py", "quality.py"}
    if path.parent.name in ("graph_cache", "fast") and path.name not in commands:
        assert "diffusers" not in tops
        doors = ("graph_cache.models.diffusers", "graph_cache.models.comfyui")
        assert not any(name.startswith(doors) for name in names)


def test_the_pack_imports_nothing_of_its_own_by_an_absolute_name():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.partition(".")[0] != "graph_cache", path


@pytest.mark.parametrize("module", ["graph_cache", "graph_cache.models.comfyui"])
def test_the_engine_imports_without_diffusers(module):
    """ComfyUI users need not pay for diffusers' import, nor have it work."""
    code = f"import sys; sys.modules['diffusers'] = sys.modules['comfy'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_versions_agree():
    import graph_cache

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{graph_cache.__version__}"' in text
    assert f"## {graph_cache.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_reason_is_documented():
    from graph_cache import REASONS

    text = (ROOT / "docs" / "reasons.md").read_text()
    documented = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(documented) == sorted(REASONS)
    for reason in REASONS.values():
        assert reason.hint in text


def test_the_help_page_lists_what_comfyui_can_meet():
    from graph_cache.reason_rows_comfyui import ROWS

    text = (ROOT / "web" / "docs" / "QwenImage21GraphCache.md").read_text()
    for reason in ROWS:
        assert f"| `{reason.code}` | {reason.sentence.format(detail='…')} | {reason.hint} |" in text


def test_every_language_has_every_text():
    import json
    import re

    script = (ROOT / "web" / "strings.js").read_text()
    english = dict(re.findall(r'\n  (\w+): "(.*)",', script))
    for language in ("en", "zh"):
        served = json.loads((ROOT / "locales" / language / "main.json").read_text())
        texts = served["qwenImageGraph"]
        assert set(texts) == set(english)
        for key, value in english.items():
            assert sorted(re.findall(r"{\w+}", texts[key])) == sorted(re.findall(r"{\w+}", value))
    assert json.loads((ROOT / "locales/en/main.json").read_text())["qwenImageGraph"] == english
