"""Which errors may come from the loss of another host."""

from __future__ import annotations

import re

import jax

from skippipe_jax.errors import PeerFailed

_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""JAX's errors that start with one of these do not come from another host."""

_OWN_DEVICE = re.compile(r"\b(CUDA_ERROR|CUDNN_STATUS|CUBLAS_STATUS|hipError|HIP_ERROR)")
"""So drivers and libraries name what has failed on a device of this host."""

_BETWEEN_DEVICES = re.compile(r"NCCL|RCCL|Gloo|collective", re.IGNORECASE)
"""What names one of these may have failed at the other end, whatever else it names."""


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
