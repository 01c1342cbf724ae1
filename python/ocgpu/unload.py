"""`ocgpu unload`: ask a running serve to evict everything from the card, and say what it did."""

import http.client
import json
import sys
from typing import Any, Final

from ocgpu.errors import OcgpuError
from ocgpu.settings import Settings
from ocgpu.text import printable

__all__ = ["unload"]

# Waiting for what runs and unloading are bounded by UNLOAD_TIMEOUT each, settling by its own.
_MARGIN_SECONDS: Final = 30.0


def unload(settings: Settings) -> int:
    """Ask the serve that these settings describe.

    Returns:
        The exit status: 0 done, 1 refused.

    Raises:
        OcgpuError: Nothing of ours answers there.
    """
    admin = settings.listen_admin
    if admin is None:
        raise OcgpuError("the control plane is off; set `LISTEN_ADMIN` here and for serve")
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(admin.host, admin.host)  # noqa: S104
    patience = 2 * settings.unload_timeout + settings.settle_timeout + _MARGIN_SECONDS
    connection = http.client.HTTPConnection(host, admin.port, timeout=patience)
    token = {"Authorization": f"Bearer {settings.admin_token}"} if settings.admin_token else {}
    try:
        connection.request("POST", "/gpulock/unload", headers=token)
        response = connection.getresponse()
        status, document = response.status, _document(response.read())
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise OcgpuError(
            f"no serve answers at {admin}: {printable(reason.lower())}; start `ocgpu serve`, "
            "or set `LISTEN_ADMIN` to its control plane"
        ) from error
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        message = printable(str(document.get("error", f"status {status}")))
        sys.stderr.write(f"ocgpu: not unloaded: {message}\n")
        return 1
    models = [printable(str(name)) for name in document.get("unloaded", [])]
    sys.stdout.write(f"unloaded: {', '.join(models) or 'no model was loaded'}\n")
    if document.get("comfyui_freed") is not None:
        told = "freed its memory" if document["comfyui_freed"] else "did not answer"
        sys.stdout.write(f"ComfyUI {told}\n")
    return 0


def _document(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
