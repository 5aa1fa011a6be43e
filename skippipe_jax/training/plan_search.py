"""A search for a plan in the background, by the planner's command in a process of its own."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, load_plan

from skippipe_jax.config.replan import ReplanConfig
from skippipe_jax.training.messages import say_meanwhile
from skippipe_jax.training.search_process import SearchProcess


def is_of(case: Case, plan: Plan) -> bool:
    """Whether a plan has the stages, microbatches and paths of a case."""
    sent = tuple(sum(path[0] == node for path in plan.microbatches) for node in plan.stages[0])
    sizes, lengths = tuple(map(len, plan.stages)), {len(path) for path in plan.microbatches}
    return (sizes, sent, lengths) == (case.stages, case.microbatches, {case.path_length})


class PlanSearch:
    """Searches for the best plan of some cases, one after another, which share the budget."""

    def __init__(
        self,
        cases: Sequence[Case],
        standing: Plan,
        config: ReplanConfig,
        seed: int,
        process: SearchProcess,
        then: Callable[[Sequence[Plan]], None],
    ):
        """Begin at once, from the plan that stands where the case is like its own.

        When all have been searched, `then` is called with the plans that were found, by a thread of
        its own: a step that takes long is not waited for.
        """
        self._process, self._then = process, then
        self._is_closed, self._is_over = threading.Event(), threading.Event()
        budget_s = config.budget_s / len(cases)
        folder = tempfile.TemporaryDirectory(prefix="skippipe-replan-")
        self._cases = [Path(folder.name, f"case{number}.yaml") for number in range(len(cases))]
        commands: list[list[str]] = []
        for path, case in zip(self._cases, cases, strict=True):
            path.write_text(json.dumps(dict(case.source)), encoding="utf-8")
            words = ["plan", str(path), "--method", config.method, "--budget", f"{budget_s:g}"]
            words += ["--seed", str(seed), "-o", str(path.with_suffix(".json"))]
            if is_of(case, standing):
                standing.save(Path(folder.name, "standing"))
                words += ["--begin", str(Path(folder.name, "standing"))]
            commands.append(words)
        threading.Thread(target=self._search, args=(folder, commands), daemon=True).start()

    def _search(
        self, folder: tempfile.TemporaryDirectory[str], commands: Sequence[list[str]]
    ) -> None:
        with folder:
            for words in commands:
                if self._is_closed.is_set():
                    return
                code = self._process.run(words)
                if code and not self._is_closed.is_set():
                    why = self._process.last_words()
                    say_meanwhile(f"a search for a better plan ended with exit code {code}: {why}")
            plans = [load_plan(path) for path in sorted(Path(folder.name).glob("case*.json"))]
        if not self._is_closed.is_set():
            self._then(plans)
        self._is_over.set()

    def is_over(self) -> bool:
        """Whether all cases have been searched."""
        return self._is_over.is_set()

    def close(self) -> None:
        """End it, if it is not over, without waiting for that."""
        self._is_closed.set()
        if not self._is_over.is_set():
            for path in self._cases:
                path.unlink(missing_ok=True)  # A search that has not begun to read it ends at once.
            self._process.interrupt()
