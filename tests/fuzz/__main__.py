"""`python -m tests.fuzz TARGET [libFuzzer's options and corpora]`: fuzz one target with atheris.

A process of its own, because atheris changes the byte code of what it watches for good.
"""

import sys

import atheris


def main() -> None:
    """Fuzz until libFuzzer's options say stop; a broken invariant ends it with status 77."""
    with atheris.instrument_imports(include=["ocgpu", "tests.fuzz"]):
        from tests.fuzz.targets import TARGETS

    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


main()
