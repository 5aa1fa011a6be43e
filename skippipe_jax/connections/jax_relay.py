"""Relay of the connections to JAX's coordination service through the port of host 0.

JAX's client aborts its process within milliseconds after its connection to a failing host 0
closes, so each host keeps the local end of the relay open.
"""

from __future__ import annotations

import asyncio
import contextlib

from skippipe_sched.errors import InputError

from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import Link, each_in_a_task, open_link

RELAYED = b'["jax"]\n'
"""First line of a relayed connection."""


async def serve_jax(service: str, host: Link) -> None:
    """Relay a host's JAX client to JAX's service in this process, at the unix socket `service`."""
    own = await _open_when_available(service)
    there = asyncio.create_task(_pump(host, own))
    back = asyncio.create_task(_pump(own, host))
    try:
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        there.cancel()
        back.cancel()
        own.writer.close()


async def listen_for_jax(path: str, coordinator: tuple[str, int], keys: Keys) -> None:
    """Listen on the unix socket `path`, and relay this host's JAX client to host 0."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _relay(coordinator, keys, Link(reader, writer))

    await asyncio.start_unix_server(each_in_a_task(relay), path)


async def _relay(coordinator: tuple[str, int], keys: Keys, own: Link) -> None:
    try:
        far = await open_link(coordinator, keys=keys)
    except (OSError, InputError):
        # Host 0 is gone, which its link detects. Closing this end would abort the process.
        await asyncio.get_running_loop().create_future()
        return
    far.write(RELAYED)
    back = asyncio.create_task(_pump(far, own))
    # If the far end closes, this end stays open, for the same reason.
    await _pump(own, far)
    far.writer.close()
    await back


async def _open_when_available(path: str) -> Link:
    while True:
        try:
            return Link(*await asyncio.open_unix_connection(path))
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.05)


async def _pump(source: Link, target: Link) -> None:
    """Forward bytes until the source's connection ends; drop them once the target is closed."""
    with contextlib.suppress(OSError):  # The source's connection broke.
        while data := await source.read():
            if not target.writer.is_closing():
                target.write(data)
