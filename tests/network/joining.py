"""A host that offers places to joiners, or a joiner that measures its link to that host.

python -m tests.network.joining host ADDRESS
python -m tests.network.joining joiner ADDRESS

ADDRESS is that of the host. The joiner prints the measured link as JSON.
"""

import asyncio
import json
import sys
from dataclasses import asdict

from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.asking import JoinClient
from skippipe_jax.connections.hello import Run
from tests.connections.meshes import KEYS, Host
from tests.connections.test_join_server import Run as Offers

PORT = 61442
MEASURE_S = 4.0


async def offer(address: str) -> None:
    host = Host(0, 2, Run(), keys=KEYS)
    host.join_server.inviting = Offers()
    await host.mesh.listen([address], PORT)
    await asyncio.Event().wait()


async def measure(address: str) -> None:
    links = {}
    while not links:  # The host is still starting.
        links = await JoinClient(KEYS).ways({0: join_address(address, PORT)}, MEASURE_S)
    print(json.dumps(asdict(links[0])))


if __name__ == "__main__":
    asyncio.run({"host": offer, "joiner": measure}[sys.argv[1]](sys.argv[2]))
