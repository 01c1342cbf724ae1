"""Build what is measured with: the load in Rust, and Go's proxy where Go is at hand."""

import json
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["build_go_proxy", "build_load", "find", "first_line"]

ROOT = Path(__file__).parents[2]
GO_SOURCE = Path(__file__).with_name("reverse_proxy.go")
PLACES = {"go": "/usr/local/go/bin", "nginx": "/usr/sbin"}


def find(program: str) -> str | None:
    """Where a program is: on PATH, or where it is usually put."""
    return shutil.which(program) or shutil.which(program, path=PLACES.get(program, ""))


def build_load() -> Path:
    """Build the load; `PROXY_LOAD` names one that is built already."""
    if given := os.environ.get("PROXY_LOAD"):
        return Path(given)
    command = ["cargo", "build", "--release", "--package", "ocgpu-core", "--bench", "proxy_load"]
    built = subprocess.run(
        [*command, "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == "proxy_load" and message.get("executable"):
            return Path(message["executable"])
    raise RuntimeError("cargo built no `proxy_load`")


def build_go_proxy(go: str) -> Path:
    """Build Go's proxy; nothing outside of `target` is written."""
    folder = ROOT / "target" / "bench-proxy"
    folder.mkdir(parents=True, exist_ok=True)
    environ = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GO111MODULE": "off",
        "GOCACHE": str(folder / "go-cache"),
        "GOPATH": str(folder / "go-path"),
        "GOTOOLCHAIN": "local",
    }
    program = folder / "reverse_proxy"
    subprocess.run([go, "build", "-o", program, GO_SOURCE], env=environ, check=True)
    return program


def first_line(*command: str | Path) -> str:
    """The first line that a program says of itself."""
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return (said.stdout or said.stderr).strip().splitlines()[0]
