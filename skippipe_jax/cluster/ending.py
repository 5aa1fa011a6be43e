"""How a process ends that cannot go on without the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn

from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TRY_AGAIN_EXIT_CODE,
    as_input_error,
    code_of_interrupt,
)

from skippipe_jax.connections.links import say
from skippipe_jax.connections.threads import STDERR

LOST_HOST_EXIT_CODE = TRY_AGAIN_EXIT_CODE
"""With this code a process ends because another host was lost, or it waited too long for something
(run it again)."""

ENDS_ALL = (INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE)
"""By these a host ends for what counts for all: started again, they would end in the same way, or a
user has interrupted the run."""

CODES_OF_OTHERS = (*ENDS_ALL, LOST_HOST_EXIT_CODE)

REASON_CHARACTERS = 10_000
"""So much of what a host tells of its end the others take in."""

LINGER_S = 2.0
"""How long a process that must end waits for others to read why."""


class Verdict(NamedTuple):
    """Why a host ends because of another one, and by which code."""

    reason: str
    exit_code: int = LOST_HOST_EXIT_CODE


def exit_code_of(error: BaseException) -> int:
    """The code by which a host ends that raises this error."""
    if isinstance(error, KeyboardInterrupt):
        return code_of_interrupt(error)
    told = as_input_error(error)
    return 1 if told is None else told.exit_code


def exit_code_of_others(code: int) -> int:
    """The code by which the others end when a host ends by `code`."""
    return code if code in ENDS_ALL else LOST_HOST_EXIT_CODE


async def say_and_exit(
    verdict: Verdict,
    name: str,
    last_words: Callable[[], str],
    drained: Callable[[float], Awaitable[None]] | None,
) -> NoReturn:
    """Say why the host of this name ends, and end it whatever its main thread is doing.

    `last_words` say what to resume from, and may take some time; `drained` waits for so many
    seconds until the others, if there are some, have read what they were sent.
    """
    reason, code = verdict
    words = await asyncio.to_thread(told_in_time, last_words, code)
    ending = f"{name} stops, exit code {code}."
    try:
        say("\n".join([f"{reason.removesuffix('.')}.", f"{ending} {words}".strip()]))
        if drained is not None:
            await drained(LINGER_S)
    finally:
        exit_at_once(code)


def exit_by_fault(error: BaseException, name: str, last_words: Callable[[], str]) -> NoReturn:
    """End the host of this name by a fault of its own; what nobody has foreseen is shown whole."""
    if (foreseen := as_input_error(error)) is not None:
        say(f"error: {foreseen}")
        say(f"{name} stops, exit code {foreseen.exit_code}. {told_in_time(last_words, 1)}".strip())
        exit_at_once(foreseen.exit_code)
    say("".join(traceback.format_exception(error)).rstrip())
    say(f"{name} stops, exit code 1. {told_in_time(last_words, 1)}".strip())
    exit_at_once(1)


def told_in_time(last_words: Callable[[], str], code: int) -> str:
    """What to resume from after an end by `code`, if that is found out within some seconds."""
    if code == INPUT_ERROR_EXIT_CODE:
        return ""  # Started again, all would end in the same way.
    found = [f"What to resume from could not be told within {LINGER_S:g} s."]

    def find() -> None:
        try:
            found.append(last_words())
        except Exception as error:  # the reason matters more than a fault in the last words
            found.append(f"What to resume from could not be told: {error!r}")

    finding = threading.Thread(target=find, daemon=True)
    finding.start()
    finding.join(LINGER_S)
    return found[-1]


def exit_at_once(code: int) -> NoReturn:
    """End the process at once, with what it has printed but not what it is waiting for."""
    try:
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(LINGER_S / 2)
    finally:
        os._exit(code)


def _flush() -> None:
    STDERR.drain(LINGER_S / 2)
    with contextlib.suppress(OSError, ValueError):  # a closed stream has no reader to lose
        sys.stdout.flush()
        sys.stderr.flush()
