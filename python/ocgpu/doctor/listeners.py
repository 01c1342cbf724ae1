"""Is `ocgpu serve` running where the settings say, or does another program have its ports?"""

from typing import TYPE_CHECKING, Any, Final

import ocgpu
from ocgpu.doctor.finding import Finding, error, ok, warning
from ocgpu.doctor.upstreams import is_serve
from ocgpu.doctor.web import AskError, ask
from ocgpu.server.relay.address import Address

if TYPE_CHECKING:
    from ocgpu.settings import Listen

__all__ = ["check_listener"]

_EVERYWHERE: Final = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}  # noqa: S104  # asked, not bound


def check_listener(name: str, listen: "Listen | None") -> list[Finding]:
    """Ask a listener of serve how it is.

    Args:
        name: As in its setting: `LISTEN_ADMIN`.
        listen: Where; None when it is off.
    """
    if listen is None:
        return [ok(name, "off")]
    if listen.port == 0:
        return [ok(name, f"{listen}: a port that the kernel chooses")]
    host = _EVERYWHERE.get(listen.host, listen.host)
    address = Address.parse(f"http://{f'[{host}]' if ':' in host else host}:{listen.port}")
    try:
        answer = ask(address, "/healthz")
    except AskError as problem:
        if problem.refused:
            return [ok(name, f"{listen}: no serve runs, the port is free")]
        return [_foreign(name, listen, problem.found)]
    if not is_serve(answer):
        return [_foreign(name, listen, f"it answers {answer.status} to /healthz")]
    return [_judge(name, listen, answer.document())]


def _foreign(name: str, listen: "Listen", found: str) -> Finding:
    remedy = f"end that program, or set `{name}` to another port"
    return error(name, f"{listen}: another program has the port ({found})", remedy)


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
