import subprocess
import sys
from types import ModuleType

import ocgpu

HEAVY = {"litestar", "granian", "msgspec", "pynvml", "aiohttp", "rich", "uvloop"}


def test_importing_the_library_loads_nothing_of_the_server() -> None:
    code = "import sys, ocgpu; print(*sorted(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "ocgpu" in loaded
    assert loaded & HEAVY == set()


def test_all_names_exactly_what_is_public() -> None:
    public = [
        name
        for name, value in vars(ocgpu).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]

    assert sorted(ocgpu.__all__) == sorted([*public, "__version__"])


def test_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert ocgpu.__version__ == version("ocgpu")
