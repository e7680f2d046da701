"""`python -m cuboid`: the command, where its script is not on the PATH."""

import sys

from cuboid.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
