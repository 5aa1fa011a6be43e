"""One of two hosts whose link carries a ring, and a hop that is offered while it does.

python -m tests.network.hop_beside_ring HOST ADDRESS FOLDER

Each serves a node of both stages. The ring is that of stage 1, and the hop goes from node 0 on host
0 to node 3 on host 1, which asks for it before all else. Prints when, as JSON: `offered_s` on host
0, `arrived_s` on host 1, and `averaged_s`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from skippipe_sched.problem.links import GIBIBYTE

from skippipe_jax.config import Config, ModelConfig, NetworkConfig
from skippipe_jax.program.compiler import Hop, HopNumbers
from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.ring import RingPart
from skippipe_jax.runtime.topology import Topology, devices_of_nodes
from skippipe_jax.runtime.transport import Transfers
from tests.sched.examples import plan_of

RATE_BYTES_PER_S = 2e6
HOP_BYTES = 100_000
HOST_OF_NODE = (0, 1, 0, 1)
PLAN = plan_of(
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    locations=["near", "far"],
    links=[
        ["near", "far", 0.0, RATE_BYTES_PER_S / GIBIBYTE],
        ["far", "near", 0.0, RATE_BYTES_PER_S / GIBIBYTE],
    ],
    activation_bytes=HOP_BYTES,
)
HOP = Hop(0, 0, 3)
DEADLINE_S = 60.0
# The stages have a block each, of 4 MB.
MODEL = ModelConfig(vocabulary_size=8, width=256, layers=2, heads=4, kv_heads=4, ffn_width=1024)


def main() -> None:
    host, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    config = Config(model=MODEL, network=NetworkConfig(averaging="ring"))
    devices = devices_of_nodes(HOST_OF_NODE, [["cpu"], ["cpu"]])
    topology = Topology.of(config, PLAN, host, HOST_OF_NODE, devices, HopNumbers(1))

    def said(name: str, text: str) -> list[str]:
        """What both hosts say, once they have."""
        (folder / f"{name}{host}.part").write_text(text)
        (folder / f"{name}{host}.part").rename(folder / f"{name}{host}")
        files = [folder / f"{name}{each}" for each in range(2)]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [file.read_text() for file in files]

    requests = {1 - host: f"{address}:0"}
    device = jax.local_devices()[0]
    transfers = Transfers(host, device.client, requests, address)
    told = said("servers", json.dumps(transfers.endpoint))
    transfers.connect([json.loads(endpoint) for endpoint in told])
    links = transfers.links()
    loop = EventLoop(DEADLINE_S)
    exchange = Exchange(loop, topology, links)

    happened: dict[str, float] = {}
    ring = topology.rings[1]
    gradients = jnp.ones(ring.chunks * ring.chunk_length)
    part = RingPart(ring, 2 + host, gradients, np.dtype(np.float32))
    wanted = jax.ShapeDtypeStruct((HOP_BYTES,), jnp.uint8)
    carried = jnp.zeros(HOP_BYTES, jnp.uint8)
    if host == 1:
        exchange.ask(HOP, 0, wanted, lambda *_: happened.update(arrived_s=time.time()))
    whole = part.left
    exchange.run_ring(part, 0, lambda _: happened.update(averaged_s=time.time()))
    while "averaged_s" not in happened:
        loop.run_one(lambda: "the ring")
        if host == 0 and not happened and part.left < whole:
            exchange.give(HOP, 0, carried)
            happened["offered_s"] = time.time()
    while host == 1 and "arrived_s" not in happened:
        loop.run_one(lambda: "the hop")
    assert float(part.result()[-1]) == 2.0
    print(json.dumps(happened), flush=True)
    # The other may not have asked for all yet.
    said("ended", "")
    transfers.close()


if __name__ == "__main__":
    main()
