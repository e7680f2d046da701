"""The TOML writer against the standard library's reader."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cuboid.spec.coding import dumps

KEYS = some.text(min_size=1, max_size=6)
SCALARS = (
    some.booleans()
    | some.integers(-(2**62), 2**62)
    | some.floats(allow_nan=False)
    | some.text(some.characters(blacklist_categories=("Cs",)), max_size=12)
)
VALUES = some.recursive(
    SCALARS, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEYS, inner, max_size=3)
)


@given(some.dictionaries(some.text(some.characters(blacklist_categories=("Cs",)), min_size=1, max_size=6), VALUES))
def test_what_is_written_reads_back(table: dict[str, object]) -> None:
    text = dumps(table)
    assert tomllib.loads(text) == table


def test_plain_values_stand_before_tables() -> None:
    text = dumps({"inner": {"deep": {"x": 1.0}}, "name": 'a"b\n', "list": [1, 2]})
    assert text == 'name = "a\\"b\\n"\nlist = [1, 2]\n\n[inner.deep]\nx = 1.0\n'


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        dumps({"nothing": None})
