"""Plain values of options: read as the parser reads them, without what the parser loads for that."""

import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cuboid.cli.main import main
from cuboid.cli.plain_values import PlainCommand, PlainFirst, plain_first

VALUES = ("3", "03", "-3", "+3", "3.5", "1e9", "1e400", "1_000", "0x10", " 3", "", "nan", "true", "word", "١")


def echo(
    word: Annotated[str, typer.Option()] = "some",
    whole: Annotated[int | None, typer.Option()] = None,
    number: Annotated[float, typer.Option()] = 2.5,
    few: Annotated[int, typer.Option(min=1, max=9)] = 5,
    words: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    print(repr((word, whole, number, few, words)))


def _answer(kind: type[Any] | None, arguments: list[str]) -> tuple[int, str]:
    application = typer.Typer(add_completion=False, rich_markup_mode=None)
    application.command(cls=kind)(echo)
    result = CliRunner().invoke(application, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("option", ["--word", "--whole", "--number", "--few", "--words"])
def test_every_value_is_read_as_the_parser_reads_it(option: str) -> None:
    for value in VALUES:
        expected = _answer(None, [option, value])
        if option == "--number" and ("inf" in expected[1] or "nan" in expected[1]):
            expected = (1, "")  # a command begins with no such number
        assert _answer(PlainCommand, [option, value]) == expected, value


@pytest.mark.parametrize("value", ["nan", "-1e309", "inf", "9" * 400, "-9223372036854775808"])
def test_a_number_that_cannot_be_computed_with_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--tokens" if len(value) < 10 else "--global-batch"
    assert main(["plan", "gpt2", "h100x8", "--global-batch", "64", "--seq", "1024", f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option[2:]}") and said.count("\n") == 1, said


def test_what_is_not_given_has_its_default() -> None:
    assert _answer(PlainCommand, []) == _answer(None, []) == (0, "('some', None, 2.5, 5, None)\n")
    assert _answer(PlainCommand, ["--words", "a", "--words", "b"])[1].endswith("['a', 'b'])\n")


def test_parameters_of_a_parser_without_readers_stay_as_they_are() -> None:
    parameters = [object()]
    assert plain_first(parameters) is parameters
    assert not isinstance(getattr(parameters[0], "get_runtime_param", None), PlainFirst)


def test_a_plan_loads_no_pydantic() -> None:
    script = (
        "import sys; from cuboid.cli.main import main; "
        "main('plan gpt2 h100x8 --global-batch 64 --seq 1024 --json --top 1 --tokens 1e9 --fix tp=1'.split()); "
        "print([name for name in sys.modules if name.startswith(('pydantic', 'torch', 'rich'))], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
