"""Exit of a host: exit codes, final messages, and detection of errors caused by other hosts."""

from __future__ import annotations

import asyncio
import os
import re
import traceback
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn

import jax
from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TEMPORARY_EXIT_CODE,
    InputError,
    Terminated,
    as_input_error,
    interrupt_exit_code,
)

from skippipe_jax import log
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.errors import PeerFailed, PeerTimeout

LOST_HOST_EXIT_CODE = TEMPORARY_EXIT_CODE
"""Exit code after another host was lost, or a wait has timed out (run it again)."""

CODES_OF_PEERS = (INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, LOST_HOST_EXIT_CODE)
"""Exit codes with which a host may end because of another one."""

REASON_CHARACTERS = 10_000
"""Most characters that the others keep of a host's reason for its end."""

LINGER_S = 2.0
"""Seconds that an ending process waits for the others to receive the reason."""


class ExitReason(NamedTuple):
    """Reason and exit code of a host that ends because of another one."""

    reason: str
    exit_code: int = LOST_HOST_EXIT_CODE


class RunFailed(InputError):
    """Failure of the whole run, whichever host detects it first."""


class ExitDecision(NamedTuple):
    """Exit of a host, and its effect on its peers.

    Attributes:
        code: exit code of the host.
        code_of_peers: exit code of peers that do not continue without it.
        sentence: its message; empty where only a traceback explains the error.
    """

    code: int
    code_of_peers: int
    sentence: str


def exit_decision(error: BaseException, *, is_training: bool, joined: bool) -> ExitDecision:
    """Decide how a host that raises this error ends, and how its peers do.

    During setup, which is until `is_training`, invalid input ends all hosts with the same code;
    during training only a `RunFailed` does. A user interrupt of one host ends all. After any other
    error, and for a host that has `joined` a run, its peers treat the host as lost. Storage errors
    during training are temporary.
    """
    input_error = as_input_error(error)
    code, sentence = 1, ""
    if isinstance(error, KeyboardInterrupt):
        code = interrupt_exit_code(error)
        by = "SIGTERM: " if isinstance(error, Terminated) else ""
        sentence = f"{by}interrupted at once."
    elif isinstance(error, PeerTimeout):
        code, sentence = LOST_HOST_EXIT_CODE, str(error)
    elif input_error is not None:
        code, sentence = input_error.exit_code, f"error: {input_error}"
    elif isinstance(error, OSError) and error.filename is not None:
        sentence = f"error: {error}"
    of_storage = isinstance(error.__cause__ if input_error is error else error, OSError)
    if of_storage and is_training:
        code = LOST_HOST_EXIT_CODE
    is_of_all = not is_training or isinstance(error, RunFailed)
    ends_all = code == INTERRUPTED_EXIT_CODE or (code == INPUT_ERROR_EXIT_CODE and is_of_all)
    return ExitDecision(code, code if ends_all and not joined else LOST_HOST_EXIT_CODE, sentence)


async def log_and_exit(
    verdict: ExitReason,
    name: str,
    resume_hint: Callable[[], str],
    drained: Callable[[float], Awaitable[None]] | None,
) -> NoReturn:
    """Log why the host of this name ends, and end it whatever its main thread is doing.

    `resume_hint` returns what to resume from and may take some time. `drained` waits at most the
    given seconds until messages to other hosts are sent; None without other hosts.
    """
    reason, code = verdict
    words = await asyncio.to_thread(resume_hint_in_time, resume_hint, code)
    ending = f"{name} exits with code {code}."
    try:
        log.error("\n".join([f"{reason.removesuffix('.')}.", f"{ending} {words}".strip()]))
        if drained is not None:
            await drained(LINGER_S)
    finally:
        exit_at_once(code)


def exit_on_error(error: BaseException, name: str, resume_hint: Callable[[], str]) -> NoReturn:
    """End the host of this name after an error of its own; log a traceback if unexpected."""
    code, _, sentence = exit_decision(error, is_training=True, joined=False)
    log.error(sentence or "".join(traceback.format_exception(error)).rstrip())
    log.final_error(f"{name} exits with code {code}. {resume_hint_in_time(resume_hint, 1)}".strip())
    exit_at_once(code)


def resume_hint_in_time(resume_hint: Callable[[], str], code: int) -> str:
    """Return `resume_hint()`, or a note if it fails or takes too long; empty after wrong input."""
    if code == INPUT_ERROR_EXIT_CODE:
        return ""  # A restart would end in the same way.
    finding = DaemonThreads().submit(resume_hint)
    try:
        return finding.result(LINGER_S)
    except Exception as error:  # The reason for the end matters more than the last words.
        late = f"storage did not answer within {LINGER_S:g} s"
        return f"Last checkpoint unknown ({repr(error) if finding.done() else late})."


def exit_at_once(code: int) -> NoReturn:
    """End the process at once after flushing its log, whatever it is waiting for."""
    try:
        log.flush(LINGER_S / 2)
    finally:
        os._exit(code)


_OF_TRANSFERS = jax.errors.JaxRuntimeError | ConnectionError | TimeoutError | PeerFailed
"""Errors that a transfer or an exchange with another host raises."""

_LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Beginnings of JAX errors that another host cannot cause."""

_LOCAL_DEVICE = re.compile(r"\b(CUDA_ERROR|CUDNN_STATUS|CUBLAS_STATUS|hipError|HIP_ERROR)")
"""Names of device failures of this host in errors of drivers and libraries."""

_BETWEEN_DEVICES = re.compile(r"NCCL|RCCL|Gloo|collective", re.IGNORECASE)
"""Names of failures that the other end may have caused, whatever else a message names."""


def may_be_caused_by_peer(error: BaseException) -> bool:
    """Return whether the loss of another host can have caused this error or one in its chain."""
    if isinstance(error, KeyboardInterrupt):  # Even if it interrupted such an error.
        return False
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        # gloo's errors surface as ValueError.
        if isinstance(chain, _OF_TRANSFERS) or "Gloo" in text:
            of_device = _LOCAL_DEVICE.search(text) and not _BETWEEN_DEVICES.search(text)
            return not (text.startswith(_LOCAL_ERRORS) or of_device)
        chain = chain.__cause__ or chain.__context__
    return False
