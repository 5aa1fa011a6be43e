"""Which errors can come from another host, so that a host waits to learn whether one is lost."""

from __future__ import annotations

import jax
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.ending import may_be_caused_by_peer
from skippipe_jax.errors import PeerFailed, PeerTimeout

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
