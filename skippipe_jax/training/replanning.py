"""The leader looks for a better plan while all train on by the quick one, and proposes it.

It searches when the hosts have changed, and where `replan.drift` is given, when iterations take
other than predicted for several of them; then nodes count as quick as they were measured to be.
Links are not measured while a run trains.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skippipe_sched.problem.plan import Plan, parse_plan

from skippipe_jax.cluster.agreement import hear, tell
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config
from skippipe_jax.config.resume import digest
from skippipe_jax.connections.links import MESSAGE_CHARACTERS
from skippipe_jax.consensus.generations import Wish
from skippipe_jax.training.admission import state_bytes
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.messages import say_meanwhile
from skippipe_jax.training.other_plans import (
    busy_seconds,
    cases_to_search,
    corrected,
    has_drifted,
    is_readable,
    is_worth,
    placement_of,
)
from skippipe_jax.training.plan_search import PlanSearch
from skippipe_jax.training.report import SessionPlan
from skippipe_jax.training.search_process import Standby

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer

# Of so many iterations the median is compared with what was predicted.
SEVERAL = 8

# What is told besides a plan in the message that tells it.
ROOM_CHARACTERS = 1 << 10


class FoundPlans:
    """The plan of each generation that goes on by one that was searched for, as hosts know it."""

    def __init__(self):
        """Know none."""
        self._plans: dict[str, Plan] = {}

    def keep(self, plan: Plan) -> str | None:
        """Know a plan, and return its digest; None for one that is too large to be told."""
        packed = _packed(plan)
        if len(packed) > MESSAGE_CHARACTERS - ROOM_CHARACTERS:
            return None
        name = digest(plan.to_json())
        self._plans[name] = _unpacked(packed)  # As all others get it.
        return name

    @property
    def names(self) -> list[str]:
        """The digests of those that are known here."""
        return [*self._plans]

    def of_team(self, team: Team, agreed: SessionPlan, timeout_s: float) -> Plan | None:
        """The plan of a team's generation; one who knows it tells it to those who do not.

        All hosts of the team call this together. None where the generation has none, or nobody who
        is left knows it: they then go on by the quick plan.
        """
        name, source = team.generation.plan, agreed.plan_source
        if not name or not agreed.is_plan_known:
            return None
        if team.index == source:
            tell(team, "found_plan", lambda: _packed(self._plans[name]))
        if name not in self._plans:
            assert source is not None, "another host knows it"
            plan = _unpacked(hear(team, "found_plan", [source], timeout_s)[source])
        else:
            plan = self._plans[name]
        self._plans = {name: plan}
        return plan


def _packed(plan: Plan) -> str:
    return base64.b64encode(zlib.compress(json.dumps(plan.to_json()).encode())).decode()


def _unpacked(packed: str) -> Plan:
    return parse_plan(json.loads(zlib.decompress(base64.b64decode(packed))))


class Replanning(Callback):
    """Searches as long as a generation lasts, on the leader, which may take what is found."""

    def __init__(
        self,
        config: Config,
        team: Team,
        plans: FoundPlans,
        standing: Plan,
        own: Plan,
        host_of: Sequence[int],
        trainer: Trainer,
        standby: Standby,
    ):
        """Begin to search, if `standing` is a quick plan.

        `own` is the run's own plan, whose nodes are served by the hosts `host_of`.
        """
        self._config, self._team, self._plans = config, team, plans
        self._trainer, self._standby = trainer, standby
        self._standing, self._own = standing, own
        self._kept = [node for node, host in enumerate(host_of) if host in team.hosts]
        self._host_of = [host_of[node] for node in self._kept]
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=SEVERAL)
        self._looks_for_drift = config.replan.drift is not None
        self._search: PlanSearch | None = None
        if standing is not own and not team.generation.plan:
            self._begin_search()

    def _begin_search(self) -> None:
        cases = cases_to_search(self._standing, self._own)
        config = self._config
        try:
            process = self._standby.process()
        except OSError as error:  # No memory, or a full disk: a run needs no better plan.
            return say_meanwhile(f"no search for a better plan: {error}")
        self._search = PlanSearch(
            cases, self._standing, config.replan, config.plan.seed, process, self._found
        )

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Look whether a search has to begin."""
        del trainer
        if self._search is None or self._search.is_over():
            self._look_for_drift(metrics)

    def _found(self, plans: Sequence[Plan]) -> None:
        """While a step is under way: propose the quickest plan, if there is one that may be."""
        readable = filter(self._is_readable, plans)
        found = min(readable, key=lambda plan: plan.predicted.iteration_s, default=None)
        if found is not None:
            self._propose(found)

    def _is_readable(self, found: Plan) -> bool:
        return is_readable(found, self._standing, self._host_of, self._team.generation.apart)

    def _propose(self, found: Plan) -> None:
        trainer = self._trainer
        standing, stages = self._standing, len(found.stages)
        sizes = state_bytes(self._config, stages)
        gain, team = self._config.replan.gain, self._team
        iterations = self._config.train.steps - trainer.steps_done
        if not is_worth(found, standing, gain, iterations, self._host_of, sizes):
            return
        name = self._plans.keep(found)
        if name is None:
            return
        say_meanwhile(
            f"{found.method} has found a plan by which an iteration takes "
            f"{found.predicted.iteration_s:.3g} s instead of {standing.predicted.iteration_s:.3g} s"
        )
        placement = placement_of(found, self._kept, team.generation.placement)
        trainer.membership.control.wishes(Wish(team.generation.number, placement, name))

    def _look_for_drift(self, metrics: Mapping[str, Any]) -> None:
        """Once in a generation, search for nodes as they were measured to be."""
        drift = self._config.replan.drift
        if drift is None or not self._looks_for_drift or metrics["compilations"]:
            return
        self._recent.append(metrics)
        seconds = [line["seconds_per_iteration"] for line in self._recent]
        if len(seconds) < SEVERAL or not has_drifted(seconds, metrics["predicted_seconds"], drift):
            return
        busy_s = busy_seconds(self._recent)
        self._looks_for_drift = False
        if busy_s is not None:
            self._standing = corrected(self._standing, busy_s)
            self._begin_search()

    def close(self) -> None:
        """Search no more."""
        if self._search is not None:
            self._search.close()
            self._search = None
