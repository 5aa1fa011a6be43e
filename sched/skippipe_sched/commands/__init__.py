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
    "plot": "draw one iteration of a plan",
    "simulate-faults": "simulate a run whose hosts vanish and come back",
    "serve-plan": "plan which hosts serve which stages of a model",
}
FORMER_NAMES = {"draw": "plot", "churn": "simulate-faults"}
