"""Errors of a run, except the input errors, which the planner shares."""

from __future__ import annotations

from typing import Any

from skippipe_sched.errors import InputError, SkipPipeError


class PeerError(SkipPipeError):
    """Base of errors that another host caused."""


class PeerTimeout(PeerError, TimeoutError):
    """Timeout of a wait for another host; the process exits with the code of a lost host."""


class TransferTimeout(PeerTimeout):
    """Timeout of a wait for transfers, of which one may be lost although all hosts are alive."""


class PeerFailed(PeerError):
    """Failure of another host during an operation that this host waited for.

    Attributes:
        kind: name of the class of the other host's error; empty if unknown.
    """

    def __init__(self, text: str, kind: str = ""):
        """Store both."""
        super().__init__(text)
        self.kind = kind


class TlsMismatch(PeerError):
    """Connection of which only one end has a secret."""

    def __init__(self, text: str = "one end of the connection has a secret, the other has none"):
        """Use the default text unless another one is passed."""
        super().__init__(text)


class MembershipChanged(SkipPipeError):
    """Change of the set of hosts that train."""


class GenerationEnded(MembershipChanged):
    """End of the generation: operations in progress are abandoned for the next session."""

    def __init__(self, text: str = "the generation has ended"):
        """Use the default text unless another one is passed."""
        super().__init__(text)


class HostLeft(MembershipChanged):
    """Graceful leave of this host; the others continue without it."""


class StorageError(SkipPipeError):
    """Failure of the file system that a run writes to."""


class CheckpointFailed(StorageError):
    """Checkpoint that was not committed, for a reason that the user cannot fix."""


class CorruptCheckpoint(InputError):
    """File of a checkpoint that is missing, or differs from the committed one."""

    def __init__(self, step: int, field: str, value: str, problem: str, remedy: str):
        """Keep 200 characters of the value, because hosts send each other this error."""
        super().__init__(field, value[:200], problem, remedy)
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and its arguments, for pickling."""
        return type(self), (self.step, *self.fields())

    def fields(self) -> list[str]:
        """Return all fields except the step, to send to other hosts."""
        return [self.field, self.value, self.problem, self.remedy]

    def with_remedy(self, remedy: str) -> CorruptCheckpoint:
        """Return the same error with another remedy."""
        return CorruptCheckpoint(self.step, self.field, self.value, self.problem, remedy)


class RebuildImpossible(SkipPipeError):
    """Lost stage that cannot be rebuilt, so that all hosts roll back; the text says why."""
