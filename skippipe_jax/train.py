"""Entry point of training: `python -m skippipe_jax.train --config FILE` is `skippipe train`."""

import sys

from skippipe_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
