"""Print requirements of pyproject.toml, one a line: build, runtime, or the name of an extra."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(group: str) -> list[str]:
    """Return the requirements of one group."""
    config = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    if group == "build":
        backend = config["tool"]["scikit-build"]
        tools = [f"{tool}{backend[tool]['version']}" for tool in ("cmake", "ninja")]
        return config["build-system"]["requires"] + tools
    if group == "runtime":
        return config["project"]["dependencies"]
    return config["project"]["optional-dependencies"][group]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(requirements(name)))
