"""Trains LLaMA models over partial, reordered pipeline paths, on one machine or on many hosts."""

from skippipe_sched.errors import end_quietly_on_interrupt

end_quietly_on_interrupt()
