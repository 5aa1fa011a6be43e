"""Decoding of a group's sequences on hosts that join and leave."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import numpy as np
from jaxtyping import Array, Float, Int
from skippipe_sched.problem.plan import DATA_STAGE
from skippipe_sched.serving.case import FRONT

from skippipe_jax.inference.decoding import PREFILL_TOKENS, StageExecutor, Step, span_of
from skippipe_jax.inference.partial import StageOrder
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.inference.token_sampling import TokenScores
from skippipe_jax.serving.hosts import RouteFailed, StageHosts
from skippipe_jax.serving.local_stages import ActivationCodec
from skippipe_jax.serving.routing import Route, route_parts, stages_of

MAX_IN_FLIGHT = 4
"""Most spans of prompts in flight while the next one is sent."""


class RoutedExecutor(StageExecutor):
    """Executor that runs the front's stages locally and the others on the hosts of a route.

    When a host of the route is lost, or a stage becomes available, it takes another route and
    recomputes all sequences along it from their first token, which fills the caches there.
    """

    waits = True

    def __init__(self, model: StagedModel, hosts: StageHosts, group: int):
        """Start with empty slots and no route."""
        order, slots = tuple(range(model.stages)), hosts.slots
        options = {"local_stages": hosts.own_stages, "scales": hosts.scales}
        super().__init__(model, order, slots.each, slots.length, **options)
        self._hosts, self._group = hosts, group
        self._codec = ActivationCodec(model.config, slots.hop_dtype)
        self._route: Route | None = None
        self._version = -1
        self._epoch = 0
        # Spans of prompts in flight along the route; later steps wait for them.
        self._in_flight = deque[Future[np.ndarray]]()
        # By slot: the tokens so far, and the stages that have run for all of them.
        self._tokens: dict[int, list[int]] = {}
        self._used: dict[int, set[int]] = {}

    def begin(self, slot: int, stages: StageOrder | None) -> None:
        """Implement `Decoder.begin`."""
        super().begin(slot, stages)
        if not self._tokens:
            self._route = None  # A new route costs nothing while no sequence runs.
        self._tokens[slot] = []
        self._used[slot] = {*self.order} - self._skipped[slot]

    def end(self, slot: int) -> None:
        """Implement `Decoder.end`."""
        super().end(slot)
        self._tokens.pop(slot, None)
        self._used.pop(slot, None)

    def close(self) -> None:
        """Implement `Decoder.close`."""
        self._hosts.give_up()

    def stages_of(self, slot: int) -> StageOrder:
        """Implement `Decoder.stages_of`."""
        return tuple(sorted(self._used[slot]))

    def prefill(
        self, step: Step, targets: Int[np.ndarray, "1 time"] | None = None
    ) -> TokenScores | None:
        """Implement `Decoder.prefill`; do not wait for hosts if nothing is scored."""
        if targets is not None:
            return super().prefill(step, targets)
        self._run(step, is_read=False)
        return None

    def run(self, step: Step) -> Float[Array, "row time width"]:
        """Return the residual stream after all available stages.

        Raises:
            Unavailable: if a stage is lost and `when_lost` is `fail`.
        """
        return self._run(step, is_read=True)

    def _run(self, step: Step, *, is_read: bool) -> Array:
        while True:
            try:
                route = self._current_route()
                x = self._run_along(route, step, is_read=is_read)
            except RouteFailed:
                self._route = None
                continue
            self._record(step, route)
            return x

    def _current_route(self) -> Route:
        """Return the current route, or choose a new one and recompute all sequences along it.

        Raises:
            RouteFailed: if a host of the new route is lost in the meantime.
        """
        version = self._hosts.version
        if self._route is not None and version != self._version and self._hosts.holds(self._route):
            self._version = version
        if self._route is None or version != self._version:
            self._route = None
            self._in_flight.clear()  # Steps in flight along the old route run again.
            route, self._epoch = self._hosts.route(self._group)
            for slot, tokens in self._tokens.items():
                for start in range(0, len(tokens), PREFILL_TOKENS):
                    span = tokens[start:][:PREFILL_TOKENS]
                    self._run_along(route, span_of(span, start, slot, self.length), is_read=False)
                if tokens:
                    self._used[slot] &= {DATA_STAGE, *stages_of(route)}
            self._route, self._version = route, version
        return self._route

    def _run_along(self, route: Route, step: Step, *, is_read: bool) -> Array:
        """Run a step along a route; return its output, which is meaningless unless `is_read`.

        Raises:
            RouteFailed: if a host of it is lost, now or during an earlier step still in flight.
        """
        x = self.forward(DATA_STAGE, step.tokens, step)
        lost = {*self.order} - {DATA_STAGE, *stages_of(route)}
        skipped = [sorted(stages | lost) for stages in self.skipped_by(step)]
        place, parts = x.sharding, route_parts(route)
        for number, part in enumerate(parts):
            if part[0].host == FRONT:
                x = self.follow(part[0].stages, x, step, skipped)
                continue
            waits = is_read or number < len(parts) - 1
            arguments = self._codec.packed(x), step, skipped
            done = self._hosts.start(self._group, self._epoch, part, *arguments, is_read=waits)
            self._in_flight.append(done)
            # Steps return in order: once one has returned, all earlier ones have.
            while len(self._in_flight) > (0 if waits else MAX_IN_FLIGHT):
                self._in_flight.popleft().result()
            if waits:
                x = self._codec.unpacked(done.result(), place)
        return x

    def _record(self, step: Step, route: Route) -> None:
        """Record the tokens of a step, to recompute them if the route changes."""
        is_token = step.positions < self.length
        slots = range(len(step.positions)) if step.slot is None else [step.slot]
        for row, slot in enumerate(slots):
            tokens: Int[np.ndarray, " token"] = step.tokens[row][is_token[row]]
            if len(tokens) and slot in self._tokens:
                self._tokens[slot] += tokens.tolist()
                self._used[slot] &= {DATA_STAGE, *stages_of(route)}
