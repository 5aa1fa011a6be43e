"""How a process ends that cannot go on without the others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NamedTuple, NoReturn

from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TRY_AGAIN_EXIT_CODE,
    as_input_error,
)

LOST_HOST_EXIT_CODE = TRY_AGAIN_EXIT_CODE
"""With this code a process ends because another host was lost, or it waited too long for something
(run it again)."""

LINGER_S = 2.0
"""How long a process that must end waits for others to read why."""


class Verdict(NamedTuple):
    """Why a host ends because of another one, and by which code."""

    reason: str
    exit_code: int = LOST_HOST_EXIT_CODE


def exit_code_of(error: BaseException) -> int:
    """The code by which a host ends that raises this error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_EXIT_CODE
    told = as_input_error(error)
    return 1 if told is None else told.exit_code


def exit_code_of_others(code: int) -> int:
    """The code by which the others end when a host ends by `code`.

    It is the same where what ended that host counts for all: started again, they would end in the
    same way, or a user has interrupted the run.
    """
    for_all = (INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE)
    return code if code in for_all else LOST_HOST_EXIT_CODE


def exit_at_once(code: int) -> NoReturn:
    """End the process at once, with what it has printed but not what it is waiting for."""
    try:
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(LINGER_S / 2)
    finally:
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream has no reader to lose
        sys.stdout.flush()
        sys.stderr.flush()
