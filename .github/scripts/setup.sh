#!/usr/bin/env bash
# Make .venv with the tools and the dependencies of the lock file. Argument: the Python to use (3.11 or newer).
set -euo pipefail
python=${1:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "ocgpu needs Python 3.11 or newer: $python is $("$python" --version 2>&1); set PYTHON=/path/to/python3.11" >&2
  exit 1
}
command -v cargo >/dev/null || {
  echo "ocgpu needs a Rust toolchain: install it from rustup.rs or your distribution (cargo 1.88 or newer)" >&2
  exit 1
}

[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/pip install --quiet --upgrade 'pip>=25.1'
.venv/bin/pip install --quiet --constraint .github/requirements/dev.lock --group dev
# The project's own run-time dependencies, without building it: `make dev` does that.
.venv/bin/python .github/scripts/runtime_requirements.py | .venv/bin/pip install --quiet --constraint .github/requirements/dev.lock --requirement /dev/stdin
touch .venv/setup.stamp
