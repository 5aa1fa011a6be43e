"""The errors of a run, beside those of input, which the planner has too."""

from __future__ import annotations

from typing import Any

from skippipe_sched.errors import InputError, SkipPipeError


class PeerError(SkipPipeError):
    """The base of errors that another host has caused."""


class PeerTimeout(PeerError, TimeoutError):
    """A host waited too long; the process ends with the exit code of a lost host."""


class PeerFailed(PeerError):
    """Another host has failed at what this one waited for, and ends because of that."""


class TlsMismatch(PeerError):
    """At one end of a connection there is a secret, and at the other there is none."""

    def __init__(self, text: str = "one end of the connection has a secret, the other has none"):
        """Use this text unless another is given."""
        super().__init__(text)


class MembershipChanged(SkipPipeError):
    """The set of hosts that train has changed."""


class GenerationEnded(MembershipChanged):
    """The generation has ended: what is under way is abandoned for the next session."""

    def __init__(self, text: str = "the hosts go on as another generation"):
        """Use this text unless another is given."""
        super().__init__(text)


class HostLeft(MembershipChanged):
    """This host was told to leave, and the others go on without it."""


class StorageError(SkipPipeError):
    """The file system has failed where a run writes."""


class CheckpointFailed(StorageError):
    """A checkpoint is not committed, for no reason that the user could mend."""


class CorruptCheckpoint(InputError):
    """A file of the checkpoint of a step is missing, or is not as it was committed."""

    def __init__(self, step: int, field: str, value: str, problem: str, remedy: str):
        """Keep the first 200 characters of the value: hosts send each other this error."""
        super().__init__(field, value[:200], problem, remedy)
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process raise it anew."""
        return type(self), (self.step, *self.fields())

    def fields(self) -> list[str]:
        """Return the fields without the step, to send to other hosts."""
        return [self.field, self.value, self.problem, self.remedy]

    def with_remedy(self, remedy: str) -> CorruptCheckpoint:
        """Return the same damage, about which something else is to be done."""
        return CorruptCheckpoint(self.step, self.field, self.value, self.problem, remedy)


class RebuildImpossible(SkipPipeError):
    """A stage that is lost cannot be made again, so that all go back; the text says why."""
