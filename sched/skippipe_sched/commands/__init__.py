"""Commands of the planner, one module each, also part of `skippipe`.

No module loads NumPy before it runs, so that `--help` answers at once.
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
