"""Is `ocgpu serve` running where the settings say, or does another program have its ports?"""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ocgpu
from ocgpu.doctor.finding import Finding, error, ok, warning
from ocgpu.doctor.upstreams import is_serve
from ocgpu.doctor.web import AskError, ask
from ocgpu.server.relay.address import Address

if TYPE_CHECKING:
    from ocgpu.settings import Listen

__all__ = ["Health", "ask_listener", "check_listener"]

_EVERYWHERE: Final = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}  # noqa: S104  # asked, not bound


class Health(NamedTuple):
    """What a listener answered.

    Attributes:
        document: What serve says of itself; None where no serve answers.
        other: What another program there does instead; None where nobody listens.
    """

    document: dict[str, Any] | None = None
    other: str | None = None


def ask_listener(listen: "Listen | None") -> Health:
    """Ask a listener of serve how it is; None and port 0 are not asked."""
    if listen is None or listen.port == 0:
        return Health()
    host = _EVERYWHERE.get(listen.host, listen.host)
    address = Address.parse(f"http://{f'[{host}]' if ':' in host else host}:{listen.port}")
    try:
        answer = ask(address, "/healthz")
    except AskError as problem:
        return Health(other=None if problem.refused else problem.found)
    if is_serve(answer):
        return Health(document=answer.document())
    return Health(other=f"it answers {answer.status} to /healthz")


def check_listener(name: str, listen: "Listen | None", health: Health) -> list[Finding]:
    """Judge what a listener answered.

    Args:
        name: As in its setting: `LISTEN_ADMIN`.
        listen: Where; None when it is off.
        health: The answer.
    """
    if listen is None:
        return [ok(name, "off")]
    if listen.port == 0:
        return [ok(name, f"{listen}: a port that the kernel chooses")]
    if health.document is not None:
        return [_judge(name, listen, health.document)]
    if health.other is not None:
        remedy = f"end that program, or set `{name}` to another port"
        return [error(name, f"{listen}: another program has the port ({health.other})", remedy)]
    return [ok(name, f"{listen}: no serve runs, the port is free")]


def _judge(name: str, listen: "Listen", health: dict[str, Any]) -> Finding:
    version = health.get("version")
    found = f"{listen}: serve {version} runs, {health['state']}"
    if health.get("draining"):
        return warning(name, f"{found}, shutting down", "wait until it ended, then start it again")
    if version != ocgpu.__version__:
        remedy = "restart it, so that all programs run one version"
        return warning(name, f"{found}, and this is {ocgpu.__version__}", remedy)
    for part in ("registry", "lease"):
        state = health.get(part)
        if isinstance(state, dict) and state.get("enabled") is False:
            found += f"; without {part}: {state.get('reason')}"
    return ok(name, found)
