"""One host of a run, by the real command; when it ends, its replicas are written as they are.

Its arguments are the folder for them, and those of `python -m skippipe_jax.train`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from skippipe_jax import train
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.training import trainer
from tests.training_runs import by_name


def main() -> int:
    folder = Path(sys.argv.pop(1))
    made: list[Runtime] = []
    open_runtime = trainer.open_runtime

    def make_and_keep(*arguments: Any) -> Runtime:
        made.append(open_runtime(*arguments))
        return made[-1]

    trainer.open_runtime = make_and_keep
    code = train.main()
    folder.mkdir(exist_ok=True)
    for node, state in made[0].states.items():
        arrays: dict[str, Any] = by_name(state.to_save())
        np.savez(folder / f"stage{made[0].topology.stage_of[node]}_node{node:03}.npz", **arrays)
    return code


if __name__ == "__main__":
    sys.exit(main())
