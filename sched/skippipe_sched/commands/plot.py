"""Draw one iteration of a plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.errors import InputError, loading

DESCRIPTION = """\
Simulate one iteration of a plan and plot it, or write a trace. At least one output is required.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("plan", type=Path, help="JSON file")
    add("-o", "--output", type=Path, metavar="SVG", help="Gantt chart")
    add("--flows", type=Path, metavar="SVG", help="map of the traffic on links")
    add("--paths", type=Path, metavar="SVG", help="paths of the microbatches")
    add("--trace", type=Path, metavar="JSON", help="trace for ui.perfetto.dev or chrome://tracing")


def run(arguments: argparse.Namespace) -> int:
    """Write every requested picture."""
    with loading():
        from skippipe_sched.figures.flows import flows_map
        from skippipe_sched.figures.gantt import gantt
        from skippipe_sched.figures.paths import paths_picture
        from skippipe_sched.figures.trace import chrome_trace
        from skippipe_sched.problem.plan import load_plan
        from skippipe_sched.timing.simulate import simulate_plan
    plan = load_plan(arguments.plan)
    timeline = simulate_plan(plan)
    pictures: dict[str, Callable[[], str]] = {
        "output": lambda: gantt(plan, timeline),
        "flows": lambda: flows_map(plan, timeline),
        "paths": lambda: paths_picture(plan),
        "trace": lambda: json.dumps(chrome_trace(plan, timeline)) + "\n",
    }
    requested = [name for name in pictures if getattr(arguments, name) is not None]
    if not requested:
        problem = "is required unless another output is given"
        remedy = "Add -o, --flows, --paths or --trace, with a file"
        raise InputError("--output", None, problem, remedy)
    for number, name in enumerate(requested):
        path = getattr(arguments, name)
        require_writable(f"--{name}", path, arguments.plan)
        if path in [getattr(arguments, other) for other in requested[:number]]:
            problem = "is named by two options, of which one would be lost"
            raise InputError(f"--{name}", str(path), problem, "Give each its own path")
    for name in requested:
        path = getattr(arguments, name)
        write(f"--{name}", path, pictures[name]())
        print(f"wrote {path}")
    return 0
