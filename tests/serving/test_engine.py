"""The thread of an engine delivers all tokens, whatever happens between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest, ScoredToken
from skippipe_jax.serving.engine import Runner

REQUEST = DecodeRequest([1], 8, Sampling())
PATIENCE_S = 20.0


class OneStep:
    """Engine of one step: it ends the first sequence, and then the second is cancelled."""

    slots = 2

    def __init__(self, during_step: Callable[[], None]):
        self.running: set[int] = set()
        self.during_step = during_step

    @property
    def is_busy(self) -> bool:
        return len(self.running) == 2 or self.running == {20}

    def submit(self, request: DecodeRequest, number: int) -> None:
        self.running.add(number)

    def cancel(self, number: int) -> None:
        self.running.discard(number)

    def clear(self) -> None:
        self.running.clear()

    def close(self) -> None:
        pass

    def step(self, on_wait: Callable[[], None] = lambda: None) -> list[Decoded]:
        on_wait()
        self.running.discard(10)
        self.during_step()
        token = ScoredToken(7)
        return [Decoded(10, True, token, (), None), Decoded(20, False, token, (), None)]


def test_a_last_token_is_delivered_when_the_other_sequence_is_cancelled():
    async def delivered() -> list[Decoded]:
        came = asyncio.Queue[Sequence[Decoded]]()
        engine: Any = OneStep(lambda: runner.cancel(20))
        runner = Runner(engine, came.put_nowait, lambda *_: None)
        # Both before the start, so that the first step has both.
        runner.submit(10, REQUEST)
        runner.submit(20, REQUEST)
        runner.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return [*await came.get()]
        finally:
            await asyncio.to_thread(runner.stop)

    assert (10, True) in [(own.request, own.is_last) for own in asyncio.run(delivered())]
