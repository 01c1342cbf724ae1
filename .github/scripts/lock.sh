#!/usr/bin/env bash
# Resolve every dependency, for all supported Pythons and platforms, into .github/requirements/dev.lock.
set -euo pipefail
.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
  --no-emit-find-links --upgrade --group dev pyproject.toml --output-file .github/requirements/dev.lock
