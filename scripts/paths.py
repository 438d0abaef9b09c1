"""Where the Python scripts of this folder keep things; the same rule as in common.sh."""
import os
from pathlib import Path


def cache_folder():
    if os.environ.get("OSCAR_CACHE"):
        return Path(os.environ["OSCAR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oscar"
