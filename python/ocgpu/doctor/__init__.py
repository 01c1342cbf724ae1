"""`ocgpu doctor`: what a user of ocgpu may stumble over on this machine, and what to do about it.

Nothing is changed but for a probe file, which is removed. What the compiled core can tell is asked
of it; the rest comes from `/proc`, from stat(2), and from the upstreams themselves.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ocgpu.doctor import (
    clock,
    company,
    container,
    files,
    gpu,
    listeners,
    machine,
    mounts,
    place,
    processes,
    report,
    upstreams,
)
from ocgpu.doctor.finding import Finding, error
from ocgpu.errors import OcgpuError
from ocgpu.lease import Lease

if TYPE_CHECKING:
    from ocgpu.settings import Settings

__all__ = ["Finding", "examine", "run"]

Check = Callable[[], list[Finding]]


def run(settings: "Settings", gpu_wanted: str | int | None, *, json: bool) -> int:
    """Examine the machine and print what was found.

    Args:
        settings: Of serve.
        gpu_wanted: What `--gpu` said.
        json: Print JSON.

    Returns:
        The exit status: 1 when there is an error.

    Raises:
        ConfigError: `gpu_wanted` is of no legal form.
    """
    findings = examine(settings, gpu_wanted)
    if json:
        sys.stdout.write(f"{report.to_json(findings)}\n")
    else:
        report.show(findings)
    return int(any(finding.status == "error" for finding in findings))


def examine(settings: "Settings", gpu_wanted: str | int | None = None) -> list[Finding]:
    """Run all checks; arguments as of `run`."""
    before = clock.read_clocks()
    driver = gpu.look_at_driver()
    key, findings = gpu.check_key(gpu_wanted, settings.gpu_key, os.environ, driver.devices)
    findings += gpu.check_driver(driver, gpu.nvidia_device())
    findings += gpu.check_cuda(os.environ, driver.devices)
    findings += _run([("directory", partial(_check_place, key))])
    if key is not None:
        findings += _run(_sharing(key))
    findings += _check_web(settings)
    findings += machine.check_versions()
    findings += machine.check_open_files(machine.open_files_limit(), settings.max_queue)
    findings += clock.check_source(clock.current_source())
    findings += clock.check_clock(before, clock.read_clocks())
    return findings


def _run(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    return [finding for name, check in checks for finding in _guarded(name, check)]


def _guarded(name: str, check: Check) -> list[Finding]:
    """Run a check; where it cannot look, that is its finding and the others go on."""
    try:
        return check()
    except (OSError, OcgpuError) as problem:
        return [error(name, f"it cannot be looked at: {problem}", "see that this user may")]


def _check_place(key: str | None) -> list[Finding]:
    # The core alone knows which directory it is; a lease that is never taken tells, for any key.
    directory = Lease(key or "doctor").path.parent
    findings = place.check_directory(directory)
    if not os.path.isdir(directory):  # noqa: PTH112  # where one may not look, it is none
        return findings
    mount = mounts.mount_of(directory, mounts.parse_mounts(_read("/proc/self/mountinfo")))
    if mount is not None:
        findings += place.check_file_system(mount)
    # A lock on a server that does not answer would keep us, and not be killed.
    if findings[0].status == "ok" and not (mount is not None and place.is_network(mount)):
        findings += place.check_locks(directory)
    around = container.look_around(directory, mount, os.environ)
    return findings + container.check_container(directory, around, key)


def _sharing(key: str) -> list[tuple[str, Check]]:
    paths = files.files_of(key)
    private = os.environ.get("OCGPU_SHARE") == "user"

    def uses() -> list[Finding]:
        found = processes.find_uses({path.name for path in paths})
        return files.check_uses(paths, found, processes.flocked(_read("/proc/locks")))

    return [
        ("segment", partial(files.check_segment, paths, private=private)),
        ("lease files", partial(files.check_lease_files, paths, private=private)),
        ("files in use", uses),
        ("registry", partial(company.check_registry, key)),
        ("lease", partial(company.check_lease, key)),
    ]


def _check_web(settings: "Settings") -> list[Finding]:
    """Ask our listeners, then the upstreams; each of them may take its seconds to say nothing."""
    listening = {
        "LISTEN_OLLAMA": settings.listen_ollama,
        "LISTEN_COMFY": settings.listen_comfy,
        "LISTEN_ADMIN": settings.listen_admin,
    }
    with ThreadPoolExecutor(max_workers=len(listening)) as pool:
        answers = list(pool.map(listeners.ask_listener, listening.values()))
        serving = any(health.document is not None for health in answers)
        needed = _needed(settings, serving=serving)
        ollama = partial(upstreams.check_ollama, settings.ollama_url, needed=needed[0])
        comfy = partial(
            upstreams.check_comfy, settings.comfy_url, settings.listen_comfy, needed=needed[1]
        )
        checks: list[tuple[str, Check]] = [("ollama", ollama), ("comfyui", comfy)]
        found = list(pool.map(lambda named: _guarded(*named), checks))
    found += [
        listeners.check_listener(name, listen, health)
        for (name, listen), health in zip(listening.items(), answers, strict=True)
    ]
    return [finding for findings in found for finding in findings]


def _needed(settings: "Settings", *, serving: bool) -> tuple[bool, bool]:
    """Whether Ollama and ComfyUI must be there: a serve runs, or somebody said where they are."""
    default = type(settings)()
    return (
        serving or settings.ollama_url != default.ollama_url,
        serving or settings.comfy_url != default.comfy_url,
    )


def _read(path: str) -> str:
    """Read a file of `/proc`; "" where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
