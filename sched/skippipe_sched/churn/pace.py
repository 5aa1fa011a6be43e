"""When steps count, one after another, with the checkpoints between them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

# No run has more of them; what is looked through has a length that fits into a word.
MOST_STEPS = 10**15


@dataclass(frozen=True)
class Pace:
    """Steps of `iteration_s` each, from `start_s` on, when `step` of them have been made.

    After every `save_every` steps a checkpoint stops all for `save_s`.
    """

    start_s: float
    step: int
    iteration_s: float
    save_every: int
    save_s: float

    def counts_s(self, step: int) -> float:
        """When a later step counts."""
        return self._time_s(step, step - 1)

    def free_s(self, step: int) -> float:
        """When a step has counted, and its checkpoint is whole if it has one."""
        return self._time_s(step, step)

    def _time_s(self, step: int, saved: int) -> float:
        checkpoints = saved // self.save_every - self.step // self.save_every
        return self.start_s + (step - self.step) * self.iteration_s + checkpoints * self.save_s

    def steps_by(self, time_s: float) -> int:
        """The last step that counts by then."""
        most = min(MOST_STEPS, int((time_s - self.start_s) / self.iteration_s) + 1)
        later = range(self.step + 1, self.step + most + 1)
        return self.step + bisect_right(later, time_s, key=self.counts_s)

    def saved_by(self, time_s: float) -> int | None:
        """The last of these steps whose checkpoint is whole by then, if there is one."""
        step = self.steps_by(time_s) // self.save_every * self.save_every
        if step > self.step and self.free_s(step) > time_s:
            step -= self.save_every
        return step if step > self.step else None

    def free_after(self, time_s: float) -> float:
        """When the step or checkpoint that is under way at a time is done."""
        step = self.steps_by(time_s)
        return self.free_s(step) if self.free_s(step) >= time_s else self.free_s(step + 1)
