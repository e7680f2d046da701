"""`cuboid`: imports the file of the verb that was asked for and no other, and prints what is wrong in one line.

A verb is a file beside this one with a function `command`, and a line in `VERBS`.
"""

import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from keyword import iskeyword
from typing import Any

import typer
from typer.core import TyperGroup

import cuboid
from cuboid.cli.plain_values import PlainCommand, plain_first
from cuboid.errors import RankError, UserError, either, nearest_names, one_sentence, printable
from cuboid.readers import forget_sources

VERBS = {
    "plan": "Find the best layouts of a model on a cluster.",
    "explain": "Explain a plan with formulae and values.",
    "simulate": "Simulate one step of a plan: drawing, trace, picture.",
    "goodput": "Expect how much of the time is training, and how often to save.",
    "export": "Write a trained model for Hugging Face, or a plan for another engine.",
    "train": "Train a model on a layout.",
    "launch": "Write a job file for Slurm, Kubernetes or SkyPilot.",
    "generate": "Generate text with a trained model on a layout.",
    "evaluate": "Measure a trained model: perplexity, bits per byte, choices.",
    "verify": "Prove that a layout computes what one process computes.",
    "replay": "Rerun one step of a run to tell bad data from bad hardware.",
    "map": "Draw which rank sits where, and which links each group's traffic crosses.",
    "probe": "Measure this machine or these hosts for the planner; or run one rank of any job.",
    "estimate": "Estimate step time and memory of published runs, row by row.",
    "data": "Build, show and verify stores of tokens.",
    "checkpoint": "List, verify, show, copy and prune checkpoints.",
    "report": "Write one page about a run or a plan, predicted beside measured.",
    "watch": "Watch a run in the terminal while it runs.",
    "compare": "Compare runs: losses, speed, memory, settings that differ.",
    "models": "List the models Cuboid knows by name.",
    "clusters": "List accelerators and links, or show what a cluster file says.",
    "import": "Prepare a run that starts from a Hugging Face model.",
    "import-deepspeed": "Turn a DeepSpeed-style JSON into a run file.",
}
"""Verb -> what it does, in the order of the help; the file is named like the verb (import_ for import)."""

OLD_SPELLINGS = {
    "estimate": {"--out": "--output"},
    "export": {"--dtype": "--precision"},
    "plan": {"--days": "--deadline"},
    "verify": {"--dtype": "--precision"},
}
"""Verb -> what its options were called -> what they are called: accepted, and no longer shown."""

GROUPS = {
    "Plan": ("plan", "explain", "simulate", "map", "goodput", "probe", "estimate", "models", "clusters"),
    "Train": ("train", "launch", "data", "checkpoint", "import", "import-deepspeed"),
    "Prove": ("verify", "replay"),
    "Look": ("report", "watch", "compare"),
    "Use": ("generate", "evaluate", "export"),
}
"""The commands as the help shows them."""

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

NO_ROOM = {
    number: f"what this prints or writes has no room: {os.strerror(number)}; free some, or write elsewhere"
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
}
"""The error of a disk that is full -> what is said of it."""

BROKEN = (errno.EIO, errno.ESTALE, errno.ENODEV)
"""Errors of a disk, or of a file that is none."""

HELP = "Plan and train language models with data × tensor × pipeline parallelism."

# What the parser raises for a wrong option or argument; typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """All commands, listed in groups."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain_first(super().get_params(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(verb, VERBS[verb]) for verb in verbs])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    if arguments is None:
        _open_streams()
    if arguments is None and isinstance(sys.stdout, TextIOWrapper):  # not every terminal has every character
        sys.stdout.reconfigure(errors="backslashreplace")
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"  # of ranks
    status = _status(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])
    status = _told(status)
    if status == INTERRUPTED and arguments is None:
        _leave_at_once()
    if arguments is None:
        gc.freeze()  # the process ends: a last collection would look at all of torch, for half a second
    return status


def _open_streams() -> None:
    """Whoever starts this may have closed input, output and errors: a file of the run would get their number, and
    what a library says would be written into it."""
    with suppress(OSError):  # a system without a null device
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as this process lives


def _status(given: list[str]) -> int:
    try:
        return _run(given)
    except UserError as error:
        return _refuse(str(error))
    except RankError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    except UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        message = message.replace("Value error, ", "")
        # Some versions of the parser do not say what was given; what they raise it from does.
        problems = getattr(error.__cause__, "errors", None)
        if problems is not None:
            message = message.replace("Input should", f"{problems()[0]['input']} should")
        return _refuse(f"{message.rstrip('.')}; see cuboid {_verb(given) or ''} --help".replace("  ", " "))
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _print_no_more()
        return 0
    except UnicodeEncodeError as problem:  # the system's own encoding knows fewer characters
        told = f"{problem.object} is no text in this locale, whose characters are {problem.encoding}"
        return _refuse(f"{told}; use one of UTF-8, such as LC_ALL=C.UTF-8")
    except RecursionError:
        return _refuse("what was given is nested too deep, say a path of a thousand folders; use fewer levels")
    except OSError as problem:
        if problem.errno in NO_ROOM:
            _print_no_more()
            return _refuse(NO_ROOM[problem.errno])
        if problem.errno in BROKEN and problem.filename is None:
            return _refuse(f"a file cannot be read or written: {problem.strerror}; look at the disk it lies on")
        if isinstance(problem, FileNotFoundError) and problem.filename is None:  # of no file, but of all temporary ones
            return _refuse(f"{problem.strerror}; set TMPDIR to a folder that may be written")
        if problem.filename is None:  # no file of the user's
            raise
        return _refuse(f"{problem.filename} cannot be used: {problem.strerror}; name another file or folder")
    except SystemExit as leaving:
        # By this door leave a training that a signal stopped, and rich (with 1) when it has met a closed pipe first.
        return int(leaving.code or 0) if leaving.code != 1 else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _told(status: int) -> int:
    """The exit status when all that was printed has arrived, or cannot."""
    try:
        sys.stdout.flush()
    except OSError as problem:
        _print_no_more()
        if problem.errno in NO_ROOM and status == 0:
            return _refuse(NO_ROOM[problem.errno])
    return status


def _print_no_more() -> None:
    """Python would complain again when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    forget_sources()
    _check_text(arguments)
    verb = _verb(arguments)
    if verb is not None and verb not in VERBS:
        raise UserError(f"unknown command {verb}; did you mean {either(nearest_names(verb, VERBS))}?")
    arguments = [_respelled(verb, argument) for argument in arguments]
    status = _application(verb)(arguments, standalone_mode=False, prog_name="cuboid")
    return status if isinstance(status, int) else 0


def _check_text(arguments: list[str]) -> None:
    """Of bytes that are no UTF-8 Python makes halves of characters, which no file and no page takes."""
    here = ""
    try:
        here = os.getcwd()  # a part of many a name that is written
    except FileNotFoundError:  # what torch is made of does not even start there
        raise UserError("the current folder was removed; go to one that exists") from None
    except OSError:  # it does not say
        pass
    for text in (*arguments, here):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text} is not UTF-8 text; rename what it names, or write it in UTF-8") from None


def _respelled(verb: str | None, argument: str) -> str:
    name, equals, value = argument.partition("=")
    return OLD_SPELLINGS.get(verb or "", {}).get(name, name) + equals + value


def _verb(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _application(verb: str | None) -> Callable[..., object]:
    """The parser, with the asked verb loaded and only the names of the others."""
    if verb == "plan":  # no large matmul: threads would but take a tenth of a second to start
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    application = typer.Typer(
        cls=Commands,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback(help=HELP)(_options)
    for name, summary in VERBS.items():
        command = import_module(f"cuboid.cli.{module_of(name)}").command if name == verb else _name_only
        help_text = None if name == verb else summary
        application.command(name, cls=PlainCommand, help=help_text, short_help=summary)(command)
    return application


def module_of(verb: str) -> str:
    return f"{verb}_" if iskeyword(verb) else verb.replace("-", "_")


def _name_only() -> None:
    """Stands for a verb that was not asked for."""


def _print_version(asked: bool) -> None:
    if asked:
        print(cuboid.__version__)
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    """Options that stand before the verb."""


def _leave_at_once() -> None:
    """What a command began it has ended when its Ctrl-C arrives here; taking torch apart would cost a second more."""
    import multiprocessing  # here, because most commands start no process

    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)


def _refuse(sentence: str) -> int:
    with suppress(OSError):  # there is nowhere left to complain
        print(f"error: {one_sentence(sentence)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
