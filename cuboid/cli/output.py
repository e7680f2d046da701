"""Where a verb's text goes when the user names a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from cuboid.errors import UserError


def check_output(output: Path) -> None:
    """Refuse what `write_output` would refuse, before the work whose result it is; nothing is left behind."""
    with _refused(output), output.open("ab") if output.exists() else TemporaryFile(dir=output.parent):
        pass


def write_output(output: Path, text: str) -> None:
    """Write the file of `--output`."""
    with _refused(output):
        output.write_text(text, encoding="utf-8")


@contextmanager
def _refused(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"output={output} cannot be written: {problem.strerror}; name a file in a folder that exists"
        ) from None
