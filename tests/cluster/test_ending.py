"""Messages of a host that ends: why, by which code, and from where to resume.

It ends for another host only by an error that can come from one, and waits to learn whether it did.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import jax
import pytest
from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    InputError,
    TemporaryError,
    Terminated,
)

from skippipe_jax.cluster import ending, joining, membership
from skippipe_jax.cluster.ending import (
    LOST_HOST_EXIT_CODE,
    RunFailed,
    exit_decision,
    may_be_caused_by_peer,
)
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig
from skippipe_jax.errors import PeerFailed, PeerTimeout

WORDS = "Resume from step 7."


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By which a process of a test would have ended."""
    codes: list[int] = []
    for place in (ending, joining, membership):
        monkeypatch.setattr(place, "exit_at_once", codes.append)
    return codes


def test_a_fault_on_the_event_loop_says_where_to_resume(
    codes: list[int], capfd: pytest.CaptureFixture[str]
):
    host = Membership(ClusterConfig(), 1, 3)
    host.resume_hint = lambda: WORDS
    loop = asyncio.new_event_loop()
    host._end_by_fault(loop, {"exception": ZeroDivisionError("by nothing")})
    loop.close()
    assert codes == [1]
    told = capfd.readouterr().err
    assert "ZeroDivisionError: by nothing" in told
    assert told.endswith(f"{host.name} exits with code 1. {WORDS}\n")


@pytest.mark.parametrize(
    ("error", "code", "of_others", "said"),
    [
        (Terminated("by SIGTERM"), TERMINATED_EXIT_CODE, LOST_HOST_EXIT_CODE, "SIGTERM: "),
        (KeyboardInterrupt(), INTERRUPTED_EXIT_CODE, INTERRUPTED_EXIT_CODE, ""),
    ],
    ids=["SIGTERM", "SIGINT"],
)
def test_an_interrupted_host_tells_the_others_and_says_where_to_resume(
    error: BaseException,
    code: int,
    of_others: int,
    said: str,
    codes: list[int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    failed: list[tuple[str, int]] = []
    monkeypatch.setattr(Membership, "fail", lambda _, *told: failed.append(told))
    host = Membership(ClusterConfig(), 1, 3)
    host.resume_hint = lambda: WORDS
    joining._abandon(host, error)
    assert codes == [code]
    assert capfd.readouterr().err == f"{said}interrupted at once. {WORDS}\n"
    number = "SIGTERM" if said else "SIGINT"
    assert failed == [(f"was interrupted ({number})", of_others)]


def test_last_words_that_fail_or_take_too_long_hold_up_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ending, "LINGER_S", 0.5)
    resume_hint_in_time = ending.resume_hint_in_time
    assert resume_hint_in_time(lambda: WORDS, LOST_HOST_EXIT_CODE) == WORDS
    assert resume_hint_in_time(lambda: WORDS, INPUT_ERROR_EXIT_CODE) == "", "it would end so again"
    assert "ZeroDivisionError" in resume_hint_in_time(lambda: str(1 // 0), LOST_HOST_EXIT_CODE)
    held = threading.Event()
    words = resume_hint_in_time(lambda: str(held.wait(20.0)), LOST_HOST_EXIT_CODE)
    held.set()
    assert words == "Last checkpoint unknown (storage did not answer within 0.5 s)."


@pytest.mark.parametrize("outlives", [False, True])
def test_only_a_host_that_a_lost_one_could_end_waits_to_find_out_which_it_is(
    outlives: bool, monkeypatch: pytest.MonkeyPatch
):
    waited_s: list[float] = []
    monkeypatch.setattr(membership.time, "sleep", waited_s.append)
    host = Membership(ClusterConfig(heartbeat_timeout_s=100.0), 1, 3)
    if outlives:
        monkeypatch.setattr(host, "_control", object())
    host.explain(ConnectionResetError("it has gone"))
    assert (sum(waited_s) < 10.0) == outlives


WRONG = InputError("a", 1, "is wrong", "Mend it")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO), "run/step_7/data")
SETUP, TRAINING = False, True


def stale() -> InputError:
    """As the run's folder tells of what storage refuses."""
    error = InputError("run_dir", "run", "cannot be written: Stale file handle", "Look there")
    error.__cause__ = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return error


@pytest.mark.parametrize(
    ("error", "is_training", "code", "of_peers", "sentence"),
    [
        (WRONG, SETUP, 2, 2, "error: a = 1: is wrong. Mend it."),
        (WRONG, TRAINING, 2, 75, "error: a = 1: is wrong. Mend it."),
        (RunFailed("a", 1, "is NaN", "Mend it"), TRAINING, 2, 2, "error: a = 1: is NaN. Mend it."),
        (TemporaryError("a", 1, "is late", "Wait"), SETUP, 75, 75, "error: a = 1: is late. Wait."),
        (FULL, SETUP, 75, 75, "error: file = 'run/metrics.jsonl': "),
        (FULL, TRAINING, 75, 75, "error: file = 'run/metrics.jsonl': "),
        (stale(), SETUP, 2, 2, "error: run_dir = 'run': cannot be written"),
        (stale(), TRAINING, 75, 75, "error: run_dir = 'run': cannot be written"),
        (BROKEN, SETUP, 1, 75, "error: [Errno 5] Input/output error: 'run/step_7/data'"),
        (BROKEN, TRAINING, 75, 75, "error: [Errno 5] Input/output error: 'run/step_7/data'"),
        (PeerTimeout("in vain"), TRAINING, 75, 75, "in vain"),
        (KeyboardInterrupt(), SETUP, 130, 130, "interrupted at once."),
        (KeyboardInterrupt(), TRAINING, 130, 130, "interrupted at once."),
        (Terminated("by SIGTERM"), SETUP, 143, 75, "SIGTERM: interrupted at once."),
        (Terminated("by SIGTERM"), TRAINING, 143, 75, "SIGTERM: interrupted at once."),
        (ZeroDivisionError("by nothing"), SETUP, 1, 75, ""),
        (ZeroDivisionError("by nothing"), TRAINING, 1, 75, ""),
    ],
)
def test_how_a_host_ends_and_what_its_peers_make_of_it(
    error: BaseException, is_training: bool, code: int, of_peers: int, sentence: str
):
    decision = exit_decision(error, is_training=is_training, joined=False)
    assert decision[:2] == (code, of_peers)
    assert decision.sentence.startswith(sentence)
    assert bool(decision.sentence) == bool(sentence)
    # Whatever ends a host that has joined a run ends no other.
    assert exit_decision(error, is_training=is_training, joined=True)[:2] == (code, 75)


ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"


def following(error: BaseException, cause: Exception) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: the peer closed the connection"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        # Nobody need wait to learn that the device of this host has failed.
        (jax.errors.JaxRuntimeError(f"INTERNAL: Failed to launch a kernel: {ILLEGAL}"), False),
        (jax.errors.JaxRuntimeError("INTERNAL: CUDNN_STATUS_EXECUTION_FAILED"), False),
        (jax.errors.JaxRuntimeError("INTERNAL: hipErrorLaunchFailure"), False),
        (jax.errors.JaxRuntimeError(f"INTERNAL: NCCL operation has failed: {ILLEGAL}"), True),
        (ValueError("UNKNOWN: Gloo all-reduce failed"), True),
        (ConnectionResetError(), True),
        (PeerTimeout("waited in vain"), True),
        # The other host raises the error itself, and its verdict gives the reason.
        (PeerFailed("host 0 failed at 'run'"), True),
        (following(RuntimeError("the checkpoint was not committed"), PeerFailed("host 1")), True),
        (RuntimeError("mine"), False),
        # Ctrl-C, whatever was going on when it came.
        (following(KeyboardInterrupt(), TimeoutError("waited")), False),
        (InputError("plan.case", None, "missing", "Give one"), False),
    ],
)
def test_what_may_stem_from_a_peer(error: BaseException, expected: bool):
    assert may_be_caused_by_peer(error) == expected
