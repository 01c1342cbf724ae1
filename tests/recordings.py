"""The recordings of a real ComfyUI, as tests read them."""

import json
from pathlib import Path
from typing import Any

__all__ = ["blur_workflow", "events", "recorded_websocket_types", "recording"]

DATA = Path(__file__).parent / "data" / "comfyui"


def recording(name: str) -> dict[str, Any]:
    """One whole recording."""
    content: dict[str, Any] = json.loads((DATA / "v0.33.0" / f"{name}.json").read_text())
    return content


def events(name: str, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, in order."""
    return [event for event in recording(name)["events"] if event["kind"] == kind]


def blur_workflow(**changes: object) -> dict[str, Any]:
    """The body that was posted to `/prompt`, with `changes` to its first node's inputs."""
    body: dict[str, Any] = json.loads((DATA / "blur_workflow.json").read_text())
    body["prompt"]["1"]["inputs"].update(changes)
    return body


def recorded_websocket_types(name: str) -> list[str]:
    """Types of the messages that the posting client got, without the shortened ones."""
    types = [event["msg"]["type"] for event in events(name, "ws")]
    return [kind for kind in types if kind != "progress_state"]
