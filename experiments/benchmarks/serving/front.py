"""The first host of a service, which tells what its other hosts are doing when it is asked.

    python -m experiments.benchmarks.serving.front --run DIR --hosts N --coordinator HOST:PORT ...

It takes the arguments of `skippipe serve`, and is that command. Each line of stdin is answered by
a line with what `StageHosts.status` says, as JSON; the service ends with stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from skippipe_jax.cli.main import main
from skippipe_jax.serving import hosts


class ToldHosts(hosts.StageHosts):
    """The hosts of a service, of which stdin asks."""

    def __init__(self, *given: Any):
        """Answer from now on."""
        super().__init__(*given)
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        for _ in sys.stdin:
            print(json.dumps(self.status()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # The command takes it from there when it is called.
    hosts.StageHosts = ToldHosts
    sys.exit(main(["serve", *sys.argv[1:]]))
