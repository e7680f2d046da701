"""Where a verb's text goes when the user names a file."""

from pathlib import Path

from cuboid.errors import UserError


def write_output(output: Path, text: str) -> None:
    """Write the file of `--output`."""
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(
            f"output={output} cannot be written: {problem.strerror}; name a file in a folder that exists"
        ) from None
