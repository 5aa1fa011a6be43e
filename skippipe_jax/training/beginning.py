"""Where a run begins: anew, after a checkpoint, or among others that go on with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.storage.hold import Hold
from skippipe_jax.storage.layout import Checkpoint
from skippipe_jax.storage.newest_whole import prepare_run
from skippipe_jax.storage.reader import read_data_state
from skippipe_jax.training.opening import parts_of
from skippipe_jax.training.setup import Settled, go_on, settle, settle_alone


@dataclass(frozen=True)
class Beginning:
    """What the hosts of a run begin with.

    Attributes:
        settled: what they have settled.
        checkpoint: that from which they go on, if there is one.
        read: the microbatches that were read before it.
    """

    settled: Settled
    checkpoint: Checkpoint | None = None
    read: int = 0

    @property
    def step(self) -> int:
        """The steps that are done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def begin(
    config: Config, host: Membership, holding: ExitStack, *, resume: bool, config_folder: Path
) -> Beginning:
    """Settle with all other hosts where the run begins, or find out alone if they go on with it.

    `holding` keeps the folder of the run from other runs.

    Raises:
        InputError: if the configuration, the plan, the data or the checkpoint cannot be used.
    """
    if host.is_outside:
        return Beginning(settle_alone(config, host))
    folder = Path(config.run_dir)
    hold = holding.enter_context(Hold(folder))
    settled = settle(config, host, hold, resume=resume, config_folder=config_folder)
    parts = parts_of(config, settled)
    checkpoint = prepare_run(folder, host, parts=parts, spare=settled.mirror)
    read = 0
    if checkpoint is not None and settled.data is not None:
        read = settled.data.position(read_data_state(checkpoint))
    beginning = Beginning(settled, checkpoint, read)
    if host.index == 0 and resume:
        go_on(config, beginning.step)
    if host.count > 1 and not host.is_distributed:
        hold.share(host.process)
    return beginning
