"""What a posted graph is worth: which nodes exist, what is refused, what runs in which order."""

import json
from dataclasses import dataclass, field
from typing import Any, TypeGuard

__all__ = ["NODES", "Verdict", "job_order", "signature", "validate"]

Graph = dict[str, Any]

NODES: dict[str, dict[str, Any]] = {
    "EmptyImage": {
        "required": {
            "width": ["INT", {"default": 512, "min": 1, "max": 16384, "step": 1}],
            "height": ["INT", {"default": 512, "min": 1, "max": 16384, "step": 1}],
            "batch_size": ["INT", {"default": 1, "min": 1, "max": 4096}],
            "color": ["INT", {"default": 0, "min": 0, "max": 16777215, "step": 1}],
        },
        "output": ["IMAGE"],
        "output_node": False,
    },
    "ImageBlur": {
        "required": {
            "image": ["IMAGE"],
            "blur_radius": ["INT", {"default": 1, "min": 1, "max": 31, "step": 1}],
            "sigma": ["FLOAT", {"default": 1.0, "min": 0.1, "max": 10.0, "step": 0.1}],
        },
        "output": ["IMAGE"],
        "output_node": False,
    },
    "SaveImage": {
        "required": {
            "images": ["IMAGE"],
            "filename_prefix": ["STRING", {"default": "ComfyUI"}],
        },
        "output": [],
        "output_node": True,
    },
    "PreviewImage": {"required": {"images": ["IMAGE"]}, "output": [], "output_node": True},
}


@dataclass
class Verdict:
    """What validation found.

    Attributes:
        error: The `error` object of a refusal, None when something can run.
        outputs: Ids of the output nodes that will run.
        node_errors: What is wrong with which node; may be set beside good outputs.
    """

    error: dict[str, Any] | None = None
    outputs: list[str] = field(default_factory=list)
    node_errors: dict[str, Any] = field(default_factory=dict)


def refusal(kind: str, message: str, details: str = "", **extra: object) -> dict[str, Any]:
    """The `error` object of an answer."""
    return {"type": kind, "message": message, "details": details, "extra_info": extra}


def validate(graph: Graph) -> Verdict:
    """Check `graph` as ComfyUI 0.33 does."""
    for node_id, node in graph.items():
        name = node.get("class_type") if isinstance(node, dict) else None
        if name not in NODES:
            return Verdict(error=_missing(node_id, str(name)))
    outputs = [key for key, node in graph.items() if NODES[node["class_type"]]["output_node"]]
    if not outputs:
        return Verdict(error=refusal("prompt_no_outputs", "Prompt has no outputs"))
    verdict = Verdict()
    reasons: list[str] = []
    for output in outputs:
        broken = {
            key: errors for key in job_order(graph, [output]) if (errors := _check(graph, key))
        }
        if not broken:
            verdict.outputs.append(output)
        for key, errors in broken.items():
            entry = _node_error(graph, key, errors)
            verdict.node_errors.setdefault(key, entry)["dependent_outputs"].append(output)
        reasons += [f"{error['message']}: {error['details']}" for error in broken.get(output, [])]
    if not verdict.outputs:
        verdict.error = refusal(
            "prompt_outputs_failed_validation",
            "Prompt outputs failed validation",
            "\n".join(reasons),
        )
    return verdict


def job_order(graph: Graph, outputs: list[str]) -> list[str]:
    """Ids of all nodes that `outputs` need, each after what it depends on."""
    order: list[str] = []

    def visit(node_id: str) -> None:
        if node_id in order or node_id not in graph:
            return
        for value in graph[node_id].get("inputs", {}).values():
            if _is_link(value):
                visit(str(value[0]))
        order.append(node_id)

    for output in outputs:
        visit(output)
    return order


def signature(graph: Graph, node_id: str) -> str:
    """The same text for the same node with the same ancestors: what the result cache goes by."""
    node = graph[node_id]
    inputs = {
        key: signature(graph, str(value[0])) if _is_link(value) else value
        for key, value in node.get("inputs", {}).items()
    }
    return json.dumps([node["class_type"], inputs], sort_keys=True)


def _is_link(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)


def _missing(node_id: str, name: str) -> dict[str, Any]:
    return refusal(
        "missing_node_type",
        f"Node '{name}' not found. The custom node may not be installed.",
        f"Node ID '#{node_id}'",
        node_id=node_id,
        class_type=name,
        node_title=name,
    )


def _node_error(graph: Graph, node_id: str, errors: list[dict[str, Any]]) -> dict[str, Any]:
    name = graph[node_id]["class_type"]
    return {"errors": errors, "dependent_outputs": [], "class_type": name}


def _check(graph: Graph, node_id: str) -> list[dict[str, Any]]:
    node = graph[node_id]
    inputs = node.get("inputs", {})
    errors = []
    for name, config in NODES[node["class_type"]]["required"].items():
        if name not in inputs:
            kind, message = "required_input_missing", "Required input is missing"
            errors.append(refusal(kind, message, name, input_name=name))
        elif len(config) > 1 and "min" in config[1] and _below(inputs[name], config[1]["min"]):
            errors.append(_too_small(name, config, inputs[name]))
    return errors


def _below(value: object, least: float) -> bool:
    return isinstance(value, int | float) and value < least


def _too_small(name: str, config: list[Any], value: object) -> dict[str, Any]:
    return refusal(
        "value_smaller_than_min",
        f"Value {value} smaller than min of {config[1]['min']}",
        name,
        input_name=name,
        input_config=config,
        received_value=value,
    )
