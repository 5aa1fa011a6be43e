"""Values as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.fields import UNITS_S, duration, parse_yaml
from skippipe_sched.figures.amounts import duration_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("0s", 0),
        ("1.5 min", 90),
        ("2h", 7200),
        (" 7d ", 604800),
        ("1e3s", 1000),
        ("7", 7),
        (0.5, 0.5),
    ],
)
def test_a_time_has_a_unit_or_is_in_seconds(text, seconds):
    assert duration(text, "--mtbf") == seconds


@given(count=st.integers(1, 999), unit=st.sampled_from([*UNITS_S]))
def test_a_time_that_is_told_is_read_again(count, unit):
    seconds = count * UNITS_S[unit]
    assert duration(duration_text(seconds), "--mtbf") == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize(
    "text", ["", "s", True, -1, None, "2 H", "5m", "1h30min", "-1s", "nan s", "1e101s"]
)
def test_what_is_no_time_is_refused(text):
    with pytest.raises(InputError, match=r"^--mtbf = "):
        duration(text, "--mtbf")


def doubling(levels: int) -> str:
    """A list whose last element has twice as many values in it with each level."""
    lists = (f"- &a{level} [*a{level - 1}, *a{level - 1}]\n" for level in range(1, levels + 1))
    return f"- &a0 [1, 2]\n{''.join(lists)}"


@pytest.mark.parametrize(("text", "problem"), [(doubling(40), r"e\+"), ("&a [*a]", "to inf")])
def test_aliases_that_stand_for_much_more_than_is_written_are_refused(text, problem):
    with pytest.raises(InputError, match=f"not valid YAML at line 1.*aliases.*{problem}"):
        parse_yaml(text, "--config", "config.yaml")


@pytest.mark.parametrize(
    ("name", "known", "guessed"),
    [
        ("llama3-8b", ("tiny", "500m", "1.5b", "8b"), "8b"),
        ("Llama-1.5B", ("tiny", "500m", "1.5b", "8b"), "1.5b"),
        ("stepz", ("steps", "every"), "steps"),
        ("nothing", ("steps", "every"), ""),
    ],
)
def test_what_was_meant_is_guessed(name, known, guessed):
    assert fields.suggestion(name, known) == (f"Did you mean {guessed}? " if guessed else "")


def test_aliases_that_stand_for_little_are_taken():
    assert parse_yaml(doubling(3), "--config", "config.yaml")[3][1][1] == [[1, 2], [1, 2]]
    shared = "base: &base {steps: 1}\n" + "".join(f"r{n}: *base\n" for n in range(2000))
    assert parse_yaml(shared, "--config", "config.yaml")["r1999"] == {"steps": 1}
    assert len(parse_yaml(str([0] * 20_000), "--config", "config.yaml")) == 20_000


def test_a_message_shows_the_beginning_of_a_value_however_much_lies_in_it():
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    shown = str(InputError("case", value, "is wrong", "Mend it"))
    assert shown.startswith("case = [[[[")
    assert len(shown) < 250
    assert str(InputError("case", {"z": [1, (2.5,)], "a": {"b": "c"}}, "is wrong", "Mend it")) == (
        "case = {'z': [1, (2.5,)], 'a': {'b': 'c'}}: is wrong. Mend it."
    )
    long = "x" * 10_000
    assert str(InputError("a", long, "b", "c")) == f"a = '{'x' * 196}...: b. c."
