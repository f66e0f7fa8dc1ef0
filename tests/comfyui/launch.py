"""Starts ComfyUI's own main.py, with stand-ins for packages that this build of torch lacks.

python launch.py PATH_TO_COMFYUI [ARGUMENTS OF main.py ...]
"""

import runpy
import sys
from pathlib import Path

from comfy_env import StubFinder

if __name__ == "__main__":
    root = Path(sys.argv[1])
    # This folder was put first for being the script's; ComfyUI expects its own there.
    sys.path[0] = str(root)
    sys.meta_path.append(StubFinder())
    sys.argv = [str(root / "main.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
