"""The section `checkpoint`: when to save, and where to hold on to what."""

from __future__ import annotations

from dataclasses import dataclass

from skippipe_sched import fields
from skippipe_sched.errors import InputError


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and where to hold on to which checkpoints.

    Attributes:
        every: save after every so many iterations.
        keep: hold on to the last so many checkpoints; to two at least where hosts may be lost.
        keep_every: hold on for good to the checkpoint of every so many iterations.
        copy_to: URL of a folder (``gs://``, ``s3://``, ``file://`` or what else fsspec knows) to
            which the checkpoints are copied in the background, with the run's own files. A run
            whose folder is lost is resumed from there.
    """

    every: int = 50
    keep: int = 3
    keep_every: int | None = None
    copy_to: str | None = None

    def __post_init__(self):
        """Refuse intervals that never come, and a run that holds on to nothing."""
        fields.integer(self.every, "checkpoint.every", 1)
        fields.integer(self.keep, "checkpoint.keep", 1)
        if self.keep_every is not None:
            fields.integer(self.keep_every, "checkpoint.keep_every", 1)
            if self.keep_every % self.every:
                raise InputError(
                    "checkpoint.keep_every",
                    self.keep_every,
                    f"is no multiple of checkpoint.every = {self.every}, so some are never saved",
                    "Choose a multiple",
                )
        if self.copy_to is not None:
            fields.text(self.copy_to, "checkpoint.copy_to")
