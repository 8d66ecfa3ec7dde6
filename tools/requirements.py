"""What a pyproject.toml depends on, one requirement a line, so that an image can have it in a layer of its own.

python tools/requirements.py pyproject.toml [EXTRA ...]
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Of the project itself, or of its extras if any are named."""
    project = tomllib.loads(pyproject)["project"]
    if not extras:
        return list(project["dependencies"])
    return [line for extra in extras for line in project["optional-dependencies"][extra]]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(), sys.argv[2:])))
