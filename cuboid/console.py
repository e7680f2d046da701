"""Words of a long run to whoever listens."""

import sys

from cuboid.errors import printable


def say(text: str, as_warning: bool = False) -> None:
    """A line to the output, or to the error stream; one that lands on a full disk is lost, and nothing else is."""
    stream = sys.stderr if as_warning else sys.stdout
    try:
        print(printable(f"warning: {text}" if as_warning else text), file=stream, flush=True)
    except BrokenPipeError:
        raise  # the reader has seen enough
    except OSError:
        pass  # there is nowhere left to complain
