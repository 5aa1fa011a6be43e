"""Commands of the planner, a module each: `add_arguments` adds options, `run` executes it.

`python -m skippipe_sched` and `skippipe` take the same commands from here. No module loads NumPy,
or modules that need it, before it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

# Descriptions, in the order in which --help lists them.
COMMANDS = {
    "plan": "make a plan for a case",
    "compare": "plan a case by all methods, side by side",
    "simulate": "simulate one iteration of a plan",
    "plot": "plot one iteration of a plan",
    "simulate-faults": "simulate a run with failing and returning hosts",
    "serve-plan": "assign the stages of a model to hosts that serve it",
}
FORMER_NAMES = {"draw": "plot", "churn": "simulate-faults"}
