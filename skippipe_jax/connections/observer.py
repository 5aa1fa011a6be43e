"""Asks a host of a run for the run's status, without being a host."""

from __future__ import annotations

from collections.abc import Sequence

from skippipe_jax.connections.asking import asking, first_answer
from skippipe_jax.connections.hello import versions
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import HELLO_S
from skippipe_jax.connections.reception import OBSERVED, OBSERVER
from skippipe_jax.connections.status import RunStatus


async def observe(addresses: Sequence[str], keys: Keys = LOOPBACK_ONLY) -> tuple[str, RunStatus]:
    """Ask at these addresses; return the first at which a host answers, and the status it tells.

    Raises:
        InputError: if a host refuses this machine for good.
        NobodyListens: if the machines at all of these addresses refuse a connection.
        TemporaryError: if none answers.
    """
    question = OBSERVER, {part: versions()[part] for part in OBSERVED}
    answer = "status", RunStatus.parse

    async def ask(address: str) -> RunStatus:
        async with asking("status", address, keys, question, answer, HELLO_S) as (_, status):
            return status

    return await first_answer(addresses, ask)
