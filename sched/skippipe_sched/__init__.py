"""Planner: places nodes on stages and finds the path of every microbatch. Never imports JAX."""

from skippipe_sched.errors import end_quietly_on_interrupt

end_quietly_on_interrupt()
