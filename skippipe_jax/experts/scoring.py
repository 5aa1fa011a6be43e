"""Scores of one model on all domains of an ensemble, computed in a separate process.

`skippipe experts` starts it with a file that specifies the scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import run_command

from skippipe_jax.experts.tasks import DONE, data_of
from skippipe_jax.inference.ensemble import averaged
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scores import score
from skippipe_jax.runtime.compilation import enable_compilation_cache
from skippipe_jax.storage.files import atomic_write


def score_asked(path: Path) -> int:
    """Score the domains in a specification, and write scores beside it; return the exit code."""
    folder, asked = path.parent, fields.load_json(path, str(path))
    sources = [open_source(Path(run)) for run in asked["runs"]]
    models, config = [source.model() for source in sources], sources[0].config
    enable_compilation_cache(config.compilation_cache)
    model = models[0] if len(models) == 1 else averaged(models)
    data = data_of(config.data, asked)
    for domain, part, sequences in asked["parts"]:
        scores = score(model, data, domain, part, sequences)
        scores.save(folder / f"{domain}-{part}.npz")
        print(f"{domain}, {part}: {scores.loss:.4f} nats per token", flush=True)
    atomic_write(folder / DONE, json.dumps({"digest": asked["digest"]}))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: score_asked(Path(sys.argv[1]))))
