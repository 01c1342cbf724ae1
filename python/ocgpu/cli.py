"""The command `ocgpu`.

Exit status: 0 done, 1 failed, 2 usage or settings, 75 lease busy or timed out. What a command needs
beyond the library (the server, msgspec, rich) is imported when it runs, so that `ocgpu --help` and
`ocgpu run` start at once.
"""

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ocgpu
import ocgpu.run
from ocgpu.device import gpu_argument, resolve_key
from ocgpu.errors import ConfigError, LeaseBusyError, LeaseTimeoutError, OcgpuError
from ocgpu.occupancy import memory_of
from ocgpu.tables import lease_table, peers_table, show

if TYPE_CHECKING:
    from ocgpu.settings import Settings

__all__ = ["main", "make_parser"]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_LEASE: Final = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
EXIT_INTERRUPTED: Final = 130  # what a shell reports after SIGINT
# The defaults are repeated for `--help`, which must not load msgspec; a test compares them.
_ADDRESS_FLAGS: Final = {
    "LISTEN_OLLAMA": ":11435",
    "LISTEN_COMFY": ":8189",
    "LISTEN_ADMIN": "127.0.0.1:8190",
    "OLLAMA_URL": "http://127.0.0.1:11434",
    "COMFY_URL": "http://127.0.0.1:8188",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit status.

    Raises:
        SystemExit: `--help` or `--version` was asked, or the arguments are illegal (status 2).
    """
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # for as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A peer's name may have letters that stdout's encoding has not: show them as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _stdout_closed()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OcgpuError as error:
        return _complain(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"ocgpu: cannot write the output: {error.strerror}\n")
        return _stdout_closed()
    return status


def _complain(error: OcgpuError) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"ocgpu: {line}\n")
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_LEASE if isinstance(error, LeaseBusyError | LeaseTimeoutError) else EXIT_FAILED


def _stdout_closed() -> int:
    """Leave quietly when the reader went away, as `head` does: the interpreter flushes again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; `command` of what it parses is the function to call."""
    parser = argparse.ArgumentParser(
        prog="ocgpu",
        description="Let the processes of one machine share one GPU.",
        epilog="`ocgpu COMMAND --help` explains a command; `ocgpu demo` needs no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"ocgpu {ocgpu.__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = _add(commands, "serve", _serve, "arbitrate the GPU between Ollama and ComfyUI")
    _add_settings(serve)
    _add(commands, "demo", _demo, "show ocgpu at work with simulated engines; needs no GPU")
    peers = _add(commands, "peers", _peers, "show who shares the compute of the GPU")
    _add_json(peers)
    ocgpu.run.add_parser(commands)
    lease = _add(commands, "lease", _lease, "show who holds the lease of the GPU and who waits")
    _add_json(lease)
    unload = _add(commands, "unload", _unload, "have a running serve evict all models now")
    _add_settings(unload)
    check = _add(commands, "check", _check, "check the settings of serve and print them")
    _add_settings(check)
    doctor = _add(commands, "doctor", _doctor, "look for what may go wrong, and say what to do")
    _add_json(doctor)
    _add_settings(doctor)
    return parser


def _add(
    commands: Any,  # noqa: ANN401  # argparse keeps the type of its sub-parsers private
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text}.")
    parser.add_argument(
        "--gpu",
        type=gpu_argument,
        metavar="GPU",
        help="a key or any agreed name, or the number of a device (default: OCGPU_GPU_KEY, else 0)",
    )
    parser.set_defaults(command=command)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that win over the environment and the file; `settings` reads their values."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read settings from a TOML file"
    )
    parser.add_argument(
        "--gpu-share-weight", metavar="W", help="weight among the peers on the GPU (default: 1.0)"
    )
    for name, default in _ADDRESS_FLAGS.items():
        flag = f"--{name.lower().replace('_', '-')}"
        kind = "ADDRESS" if name.startswith("LISTEN_") else "URL"
        parser.add_argument(flag, metavar=kind, help=f"{name} (default: {default})")


def _settings(arguments: argparse.Namespace, *, gpu: str | int | None) -> "Settings":
    from ocgpu.settings import load_settings, near_misses

    for message in near_misses(os.environ):
        sys.stderr.write(f"ocgpu: warning: {message}\n")
    flags = ["gpu_share_weight", *(name.lower() for name in _ADDRESS_FLAGS)]
    overrides = {name: text for name in flags if (text := getattr(arguments, name)) is not None}
    if gpu is not None:
        overrides["gpu_key"] = resolve_key(gpu)
    return load_settings(os.environ, config=arguments.config, overrides=overrides)


def _serve(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, gpu=arguments.gpu)
    from ocgpu.server.serve import run

    return run(settings)


def _check(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, gpu=arguments.gpu)
    from ocgpu.settings import describe

    for name, text in describe(settings):
        sys.stdout.write(f"{name}={text}\n")
    return 0


def _unload(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, gpu=None)
    from ocgpu.unload import unload

    return unload(settings)


def _doctor(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, gpu=None)  # that there is no such GPU is a finding, no end
    from ocgpu.doctor import run

    return run(settings, arguments.gpu, json=arguments.json)


def _demo(arguments: argparse.Namespace) -> int:
    from ocgpu.demo import run

    return run(gpu=arguments.gpu)


def _peers(arguments: argparse.Namespace) -> int:
    key = resolve_key(arguments.gpu)
    snapshot = ocgpu.peers(key)
    lease = ocgpu.lease_status(key)
    memory = memory_of({peer.pid for peer in snapshot.peers}, key)
    if arguments.json:
        document: dict[str, Any] = {**snapshot.to_dict(), "lease": lease.to_dict()}
        for peer in document["peers"]:
            peer["memory_bytes"] = memory[peer["pid"]]
        sys.stdout.write(f"{json.dumps(document)}\n")
    else:
        show(peers_table(snapshot, memory))
        if lease.held:
            show(lease_table(key, lease))
    return 0


def _lease(arguments: argparse.Namespace) -> int:
    key = resolve_key(arguments.gpu)
    status = ocgpu.lease_status(key)
    if arguments.json:
        sys.stdout.write(f"{status.to_json()}\n")
    else:
        show(lease_table(key, status))
    return 0
