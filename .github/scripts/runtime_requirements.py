"""Print the run-time dependencies of pyproject.toml, one a line."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print("\n".join(project["dependencies"]))
