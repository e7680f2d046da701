"""The one kind of error that is the user's to mend, and what its sentence offers instead: nearest names and numbers."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UserError(Exception):
    """One sentence that names the field, its value and the nearest values that would work.

    The command line prints it as `error: <sentence>` and exits with status 2; nothing else is caught there.
    """


class RankError(Exception):
    """A rank process failed or fell silent; the command line prints the reason and exits with 1."""

    kind = "rank"
    """As the log of failures has it."""


class HangError(RankError):
    """Ranks stood still and were ended."""

    kind = "hang"


LONGEST = 600
"""Characters of a sentence: of a longer one only its beginning, which names the field, and its end are said."""


def printable(text: str) -> str:
    """What a terminal only shows: names and what files say may come from a stranger, and other characters would move
    its cursor, or name its window."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def one_sentence(text: str) -> str:
    """An error as one line, whatever stands in the values it names."""
    line = printable(text).replace("\n", "\\n")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 200]} … {line[-200:]}"


def nearest_names(name: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The options most like `name`, best first; the first few options when nothing is like it."""
    known = list(options)
    by_folded = {option.lower(): option for option in known}
    close = get_close_matches(name.lower(), by_folded, n=count, cutoff=0.5)
    return [by_folded[match] for match in close] or known[:count]


def either(options: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    parts = list(options)
    if len(parts) <= 1:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} or {parts[-1]}"


def nearest_numbers(value: int, works: Callable[[int], bool], low: int, high: int) -> list[int]:
    """The closest working number below `value` and the closest above it, within [low, high], smaller first."""
    below = next((number for number in range(min(value, high), low - 1, -1) if works(number)), None)
    above = next((number for number in range(max(value + 1, low), high + 1) if works(number)), None)
    return [number for number in (below, above) if number is not None]


def up_to(last: int, field: str = "") -> str:
    """`rank=0`, `rank=0 to rank=3`."""
    return f"{field}0 to {field}{last}" if last else f"{field}0"


def use(field: str, values: Iterable[object]) -> str:
    """The end of an error sentence: `use tp=2 or tp=4`."""
    return "use " + either(f"{field}={value}" for value in values)
