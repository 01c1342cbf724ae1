"""The OpenAPI document of the control plane says the truth: schemathesis checks a real serve."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ocgpu import Lease, Pacer
from tests.server.client import call
from tests.server.jobs import chat
from tests.server.served import Served

TOKEN = "schema-token"  # noqa: S105 - of this test
COMMAND = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")
EXAMPLES = "5"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_answer_of_the_control_plane_is_as_its_schema_says(
    serve: Callable[..., Served], gpu_key: str, tmp_path: Path
) -> None:
    served = serve(ADMIN_TOKEN=TOKEN)
    schema = f"{served.admin}/ocgpu/schema/openapi.json"
    # Peers, a holder, transitions and probes, so that no list in the answers is empty.
    with Pacer(name="peer"), Lease(gpu_key, "shared"):
        assert chat(served).status == 200
        for token, path, wanted in ((TOKEN, "/events", 200), ("wrong", "/metrics", 401)):
            headers = {"Authorization": f"Bearer {token}"}
            assert call("GET", served.admin + path, headers=headers).status == wanted
        run = subprocess.run(
            [
                *COMMAND,
                "run",
                schema,
                f"--header=Authorization: Bearer {TOKEN}",
                "--checks=all",
                "--phases=coverage,fuzzing",
                f"--max-examples={EXAMPLES}",
                "--seed=1",
                "--no-color",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "12 passed" in run.stdout
    served.wait_state("idle", llm_inflight=0, image_pending=False)


def test_every_refusal_is_promised(served: Served) -> None:
    schema = call("GET", f"{served.admin}/ocgpu/schema/openapi.json").json()

    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            promised = set(operation["responses"])
            assert {"200", "400", "403"} <= promised, (method, path)
            assert ("401" in promised) == (path != "/healthz"), (method, path)
            assert ("503" in promised) == (path in {"/healthz", "/gpulock/unload"}), (method, path)
