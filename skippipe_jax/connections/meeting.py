"""How a host comes to the others: to all of them as a run begins, or to those that live of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from skippipe_jax import log
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import (
    BIND_VARIABLE,
    chosen_address,
    first_address,
    reachable_address,
    require_free,
)
from skippipe_jax.connections.jax_relay import listen_for_jax
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import Link, answered, reach
from skippipe_jax.connections.mesh import Mesh, let_in
from skippipe_jax.connections.waiting import telling


class Meeting:
    """A host that finds out by which address the others reach it, and is connected with them.

    Attributes:
        mesh: its connections.
        address: its IP address, on which it listens.
    """

    def __init__(
        self,
        config: ClusterConfig,
        coordinator: tuple[str, int],
        keys: Keys,
        new_mesh: Callable[[], Mesh],
    ):
        """Be alone; host 0 is found at `coordinator`, and the connections are of a new mesh."""
        self.mesh = new_mesh()
        self.address = "127.0.0.1"
        self._config, self._coordinator, self._keys = config, coordinator, keys
        self._new_mesh = new_mesh

    async def with_all(self, relay: str | None) -> None:
        """Begin a run, once all are there; other hosts than host 0 listen for JAX at `relay`.

        Raises:
            InputError: if one of them refuses this host, or it cannot listen.
            TemporaryError: if one does not come in time.
        """
        name, port = self._coordinator
        chosen = chosen_address(self._config.bind_address)
        if self.mesh.directory.hello.host == 0:
            near = chosen or first_address(name)
            self.address = chosen or reachable_address(near, name)
            if self.address != near:
                log.info(
                    f"{name} is {near} here, so this host listens on {self.address} as well. "
                    f"{BIND_VARIABLE} chooses another address."
                )
            # Other hosts on this machine may look for host 0 where its name leads them.
            await self.mesh.listen(list(dict.fromkeys([self.address, near])), port)
            await self.mesh.gather()
        else:
            link = await reach(self._coordinator, self._config.connect_timeout_s, self._keys)
            self.address = chosen or reachable_address(_near_end(link), name)
            if relay is not None:
                await listen_for_jax(relay, self._coordinator, self._keys)
            await self._listen()
            await self.mesh.join(self._coordinator, link)

    async def with_those_left(self, last_addresses: Sequence[str]) -> bool:
        """Come back to a run that has begun, whose hosts listened there; whether it lives.

        Raises:
            InputError: if one of its hosts refuses this one.
        """
        heartbeat_timeout_s = self._config.heartbeat_timeout_s
        for address in last_addresses:
            told = (
                f"{address}: host {self.mesh.directory.hello.host} still counts as connected there"
            )
            with telling(lambda _, told=told: f"{told}; asked again", 2 * heartbeat_timeout_s):
                if await let_in(partial(self._comes_back, address), heartbeat_timeout_s):
                    return True
        return False

    async def _comes_back(self, address: str) -> bool:
        if (link := await answered(address, self._keys)) is None:
            return False
        self.mesh.close()  # Another may be open, of which nothing has come.
        chosen = chosen_address(self._config.bind_address)
        self.address = chosen or reachable_address(_near_end(link), self._coordinator[0])
        self.mesh = self._new_mesh()
        await self._listen()
        return await self.mesh.rejoin(link)

    async def _listen(self) -> None:
        """Listen for the others, but where ``--coordinator`` says where."""
        own = self.mesh.directory.hello
        port = self._config.port(own.host, own.host, own.hosts)
        require_free("cluster.transfer_port", self.address, port)
        await self.mesh.listen([self.address], port)


def _near_end(link: Link) -> str:
    """Return the IP address of this end of a connection."""
    return link.writer.get_extra_info("sockname")[0]
