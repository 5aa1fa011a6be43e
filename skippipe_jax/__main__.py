"""Entry point of all commands: `python -m skippipe_jax train` is `skippipe train`."""

import sys

from skippipe_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
