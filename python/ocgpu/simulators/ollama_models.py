"""The models that the simulated Ollama offers, and what it says about each."""

import datetime
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT_MODELS", "Model", "full_name", "now", "parse_keep_alive"]

GIB = 1024**3
MODIFIED = "2026-09-01T12:00:00.000000000Z"
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Model:
    """One model on the shelf.

    Attributes:
        name: With its tag, as `/api/tags` lists it.
        size_bytes: On disk, and on the card once loaded.
        family: Architecture.
        parameters: As Ollama writes it: `3.2B`.
        embedding: It makes vectors only and refuses to generate.
    """

    name: str
    size_bytes: int
    family: str = "llama"
    parameters: str = "3.2B"
    embedding: bool = False

    @property
    def cloud(self) -> bool:
        """It runs on somebody else's card."""
        return self.name.endswith((":cloud", "-cloud"))

    @property
    def digest(self) -> str:
        """Sixty-four hex digits, the same for the same name."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    def details(self) -> dict[str, Any]:
        """The `details` object of tags, ps and show."""
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.parameters,
            "quantization_level": "F16" if self.embedding else "Q4_K_M",
        }

    def tag(self) -> dict[str, Any]:
        """Its entry in `/api/tags`."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": MODIFIED,
            "size": self.size_bytes,
            "digest": self.digest,
            "details": self.details(),
        }

    def show(self) -> dict[str, Any]:
        """The answer of `/api/show`."""
        return {
            "license": "",
            "modelfile": f"FROM {self.name}\n",
            "parameters": "",
            "template": "{{ .Prompt }}",
            "details": self.details(),
            "model_info": {
                "general.architecture": self.family,
                f"{self.family}.context_length": 8192,
            },
            "capabilities": ["embedding"] if self.embedding else ["completion"],
            "modified_at": MODIFIED,
        }

    def open_ai(self) -> dict[str, Any]:
        """Its entry in `/v1/models`."""
        return {"id": self.name, "object": "model", "created": 1788264000, "owned_by": "library"}


DEFAULT_MODELS = (
    Model("llama3.2:latest", 2 * GIB),
    Model("qwen3:8b", 5 * GIB, family="qwen3", parameters="8.2B"),
    Model("nomic-embed-text:latest", GIB // 4, "nomic-bert", "137M", embedding=True),
    Model("gpt-oss:120b-cloud", 384, family="gptoss", parameters="116.8B"),
)


def full_name(name: str) -> str:
    """`name` with the tag that Ollama adds where none is given."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def now() -> str:
    """The time as Ollama writes it, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def parse_keep_alive(value: object) -> float | None:
    """Seconds that a request asks its model to stay: inf for ever, None where it does not say.

    Raises:
        ValueError: Neither a number nor a Go duration.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.inf if value < 0 else float(value)
    text = str(value)
    if text in {"0", "-0"}:
        return 0.0
    parts = DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.lstrip("-"):
        message = f'time: invalid duration "{text}"'
        raise ValueError(message)
    seconds = sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)
    return math.inf if text.startswith("-") else seconds
