#!/usr/bin/env bash
# Build the wheel and import it on every Python from 3.11 that is at hand; abi3 promises that one file serves them all.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
.venv/bin/maturin build --release --quiet --out "$out"
wheel=$(echo "$out"/*.whl)

candidates=("$(readlink -f .venv/bin/python)")
for minor in 11 12 13 14 15; do
  for found in "$HOME"/.pyenv/versions/3.$minor.*/bin/python /usr/bin/python3.$minor /usr/local/bin/python3.$minor; do
    [ -x "$found" ] && candidates+=("$(readlink -f "$found")")
  done
done

for python in $(printf '%s\n' "${candidates[@]}" | sort -u); do
  rm -rf "$out/site"
  mkdir "$out/site"
  # A wheel is a zip file: no installer needed, so that a Python without pip is checked too.
  "$python" -m zipfile -e "$wheel" "$out/site"
  (cd "$out" && PYTHONPATH="$out/site" "$python" -c 'import ocgpu, sys; print("imports on", sys.version.split()[0], "from", ocgpu.__version__)')
done
