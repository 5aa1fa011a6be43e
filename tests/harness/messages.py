"""Checks of messages, which tests write with "..." for what does not matter."""

from __future__ import annotations

import re

import pytest
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, InputError


def pattern(told: str) -> str:
    """Return a pattern of texts that begin and go on as told, with anything for "..."."""
    return "^" + ".*".join(map(re.escape, told.split("...")))


def refusal(told: str) -> pytest.RaisesExc[InputError]:
    """Expect an error that says this: field and value, problem, remedy."""
    return pytest.raises(InputError, match=pattern(told))


def expect_error(done: tuple[int, str, str], told: str) -> None:
    """Check that a command printed one line only, an error that says this.

    `done` is its exit code, output and errors.
    """
    code, printed, errors = done
    assert (code, printed, errors.count("\n")) == (INPUT_ERROR_EXIT_CODE, "", 1)
    assert re.match(pattern(f"error: {told}"), errors), errors
