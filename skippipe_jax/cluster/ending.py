"""End a process that cannot go on without the others, and tell the errors that come from them."""

from __future__ import annotations

import asyncio
import enum
import os
import re
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn

import jax
from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TRY_AGAIN_EXIT_CODE,
    InputError,
    Terminated,
    as_input_error,
    code_of_interrupt,
)

from skippipe_jax import log
from skippipe_jax.errors import PeerFailed, PeerTimeout

LOST_HOST_EXIT_CODE = TRY_AGAIN_EXIT_CODE
"""With this code a process ends because another host was lost, or it waited too long for something
(run it again)."""

CODES_OF_PEERS = (INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, LOST_HOST_EXIT_CODE)
"""By these a host may end because of another one."""

REASON_CHARACTERS = 10_000
"""So much of what a host tells of its end the others take in."""

LINGER_S = 2.0
"""How long a process that must end waits for others to read why."""


class Verdict(NamedTuple):
    """Why a host ends because of another one, and by which code."""

    reason: str
    exit_code: int = LOST_HOST_EXIT_CODE


class Phase(enum.Enum):
    """How far a run has come, as a host of it knows."""

    SETUP = "setup"
    """What is wrong on one host keeps all from training."""
    TRAINING = "training"
    """The others have no part in what is wrong on one, and may go on or be started again."""


class RunFailed(InputError):
    """Says what is wrong with the run itself, whichever host is first to find it."""


class ExitDecision(NamedTuple):
    """How a host ends, and what its peers make of that.

    Attributes:
        code: by which it ends.
        code_of_peers: by which those end that do not go on without it.
        sentence: why, as it says itself; nothing where only a traceback tells.
    """

    code: int
    code_of_peers: int
    sentence: str


def exit_decision(error: BaseException, phase: Phase, joined: bool) -> ExitDecision:
    """Decide how a host ends that raises this error, and what its peers do.

    While a run is set up, wrong input ends all hosts alike; later it does only if the whole run has
    failed. A user who interrupts one host ends all. Whatever else ends a host, its peers have lost
    it, and so they have any that has `joined` a run. What storage refuses while a run trains, it
    may allow later.
    """
    told = as_input_error(error)
    code, sentence = 1, ""
    if isinstance(error, KeyboardInterrupt):
        code = code_of_interrupt(error)
        by = "SIGTERM: " if isinstance(error, Terminated) else ""
        sentence = f"{by}interrupted at once."
    elif isinstance(error, PeerTimeout):
        code, sentence = LOST_HOST_EXIT_CODE, str(error)
    elif told is not None:
        code, sentence = told.exit_code, f"error: {told}"
    elif isinstance(error, OSError) and error.filename is not None:
        sentence = f"error: {error}"
    of_storage = isinstance(error.__cause__ if told is error else error, OSError)
    if of_storage and phase is Phase.TRAINING:
        code = LOST_HOST_EXIT_CODE
    is_of_all = phase is Phase.SETUP or isinstance(error, RunFailed)
    ends_all = code == INTERRUPTED_EXIT_CODE or (code == INPUT_ERROR_EXIT_CODE and is_of_all)
    return ExitDecision(code, code if ends_all and not joined else LOST_HOST_EXIT_CODE, sentence)


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
        log.error("\n".join([f"{reason.removesuffix('.')}.", f"{ending} {words}".strip()]))
        if drained is not None:
            await drained(LINGER_S)
    finally:
        exit_at_once(code)


def exit_by_fault(error: BaseException, name: str, last_words: Callable[[], str]) -> NoReturn:
    """End the host of this name by a fault of its own; what nobody has foreseen is shown whole."""
    code, _, sentence = exit_decision(error, Phase.TRAINING, joined=False)
    log.error(sentence or "".join(traceback.format_exception(error)).rstrip())
    log.last_words(f"{name} stops, exit code {code}. {told_in_time(last_words, 1)}".strip())
    exit_at_once(code)


def told_in_time(last_words: Callable[[], str], code: int) -> str:
    """Return what to resume from after an end by `code`, if that is found within some seconds."""
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
        log.flush(LINGER_S / 2)
    finally:
        os._exit(code)


_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""JAX's errors that start with one of these do not come from another host."""

_OWN_DEVICE = re.compile(r"\b(CUDA_ERROR|CUDNN_STATUS|CUBLAS_STATUS|hipError|HIP_ERROR)")
"""Names that drivers and libraries give to failures of a device of this host."""

_BETWEEN_DEVICES = re.compile(r"NCCL|RCCL|Gloo|collective", re.IGNORECASE)
"""Names of failures that may be those of the other end, whatever else a message names."""


def may_stem_from_a_peer(error: BaseException) -> bool:
    """Tell whether the loss of another host can have caused this error, or one before it."""
    if isinstance(error, KeyboardInterrupt):  # Whatever was going on when it came.
        return False
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        # gloo's errors surface as ValueError.
        if (
            isinstance(
                chain, jax.errors.JaxRuntimeError | ConnectionError | TimeoutError | PeerFailed
            )
            or "Gloo" in text
        ):
            of_device = _OWN_DEVICE.search(text) and not _BETWEEN_DEVICES.search(text)
            return not (text.startswith(_OWN_FAULTS) or of_device)
        chain = chain.__cause__ or chain.__context__
    return False
