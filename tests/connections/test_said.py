"""What is printed of what others have told cannot move a terminal's cursor, or look like more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skippipe_jax.connections import links
from skippipe_jax.training import messages


@pytest.mark.parametrize("say", [links.say, messages.say, messages.say_meanwhile])
def test_control_characters_are_shown_and_not_obeyed(
    say: Callable[[str], None], capfd: pytest.CaptureFixture[str]
):
    say("host 1 failed: \x1b[2J\r\x07\u202e\udc80 Größe\n\tat line 2")
    told = "".join(capfd.readouterr())
    assert told == "host 1 failed: \\x1b[2J\\r\\x07\\u202e\\udc80 Größe\n\tat line 2\n"
