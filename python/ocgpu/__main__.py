"""`python -m ocgpu` is the command `ocgpu`."""

import sys

from ocgpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
