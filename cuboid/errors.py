"""The one kind of error that is the user's to mend."""


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
