"""The planner's commands, a module each: `add_arguments` makes its parser, `run` does what it says.

`python -m skippipe_sched` and `skippipe` have the same commands from here. No module loads NumPy,
or what needs it, before it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

# What each does, in the order of the list that --help prints.
COMMANDS = {
    "plan": "make a plan for a case",
    "compare": "plan a case by all methods, side by side",
    "simulate": "simulate one iteration of a plan",
    "plot": "plot one iteration of a plan",
    "simulate-faults": "simulate a run with failing and returning hosts",
    "serve-plan": "assign the stages of a model to hosts that serve it",
}
FORMER_NAMES = {"draw": "plot", "churn": "simulate-faults"}
