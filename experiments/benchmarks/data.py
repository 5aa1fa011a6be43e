"""How fast batches are made and text is tokenized, beside what waits for it.

    python -m experiments.benchmarks.data --json experiments/results/data_MACHINE.json

Loading: tokens per second of batches of the quickstart, from the text in memory and from tokens on
disk, cut into windows and packed as documents, over the tokens per second that the quickstart
trains on this machine. Batches are made here one after the other and nothing else runs.

Tokenizing: `skippipe tokenize` with a process for every core, from reading JSON lines to a
folder that is whole, beside the tokenizers library's own `encode_batch` on all cores, which gets
the texts ready in memory and whose results are thrown away. The text is Python's standard library,
`--copies` times; the tokenizer is a byte-level BPE trained on it. Both take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import QUICKSTART
from experiments.benchmarks.harness.turns import in_turns
from skippipe_jax import Run
from skippipe_jax.config import Config, DataConfig, DocumentSource, load_config
from skippipe_jax.config.data import BYTES
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.data.corpus import groups
from skippipe_jax.data.documents import read_documents
from skippipe_jax.data.tokenizing import train_bpe, write_tokens
from skippipe_jax.storage.files import new_directory
from skippipe_jax.training.trainer import Trainer

PYTHON = DocumentSource("python")


def trainer_speed(config: Config, iterations: int) -> float:
    """Tokens per second of the median iteration; the first, which compiles, is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        steps = replace(config.train, steps=1 + iterations)
        config = replace(config, run_dir=f"{folder}/run", train=steps)
        Trainer(config, config_folder=QUICKSTART.parent).run()
        lines = Run(config.run_dir).metrics[1:]
    return statistics.median(line["tokens_per_second"] for line in lines)


def loader_speed(data: DataConfig, seconds: float = 1.0) -> float:
    """Tokens per second of one microbatch after another, after the text has been read."""
    batches = TrainingBatches(data)
    tokens, start = 0, time.perf_counter()
    number = 0
    while (taken := time.perf_counter() - start) < seconds:
        tokens += batches[number]["tokens"].size
        number += 1
    return tokens / taken


def loading(config: Config, iterations: int) -> dict[str, Any]:
    """The loader beside the trainer, for each way to read."""
    trained = trainer_speed(config, iterations)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch, "tokens")
        with new_directory(tokens, "--output") as folder:
            data = config.data
            write_tokens(folder, [PYTHON], BYTES, data.held_out, data.shuffle_seed, processes=1)
        for source, path in (("python", None), ("tokens", str(tokens))):
            for packing in ("windows", "documents"):
                how = {"source": source, "packing": packing}
                speed = loader_speed(replace(config.data, path=path, **how))
                figures = {"tokens_per_second": round(speed), "ratio": round(speed / trained, 1)}
                results.append(how | figures)
    return {"trainer_tokens_per_second": round(trained), "results": results}


def tokenizing(copies: int, files: int, vocabulary_size: int, turns: int) -> dict[str, Any]:
    """Our command beside the library, on the same text and tokenizer."""
    documents = list(read_documents(PYTHON))[:files] * copies
    size = sum(len(document.text) for document in documents) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        folder, text = Path(scratch), Path(scratch, "text.jsonl")
        train_bpe(((one, PYTHON) for one in documents[:files]), vocabulary_size, folder / "bpe")
        with text.open("w") as file:
            for document in documents:
                file.write(json.dumps({"text": document.decoded(PYTHON)}) + "\n")
        library = tokenizers.Tokenizer.from_file(str(folder / "bpe" / "tokenizer.json"))
        texts = [[one.decoded(PYTHON) for one in group] for group in groups(documents)]
        processes = os.cpu_count() or 1

        def ours(turn: int) -> float:
            with new_directory(folder / f"tokens{turn}", "--output") as partial:
                source = DocumentSource("jsonl", str(text))
                write_tokens(partial, [source], str(folder / "bpe"), 0.05, 0, processes)
            return 0.0

        def theirs(_: int) -> float:
            for group in texts:
                library.encode_batch(group, add_special_tokens=False)
            return 0.0

        taken = in_turns({"ours": ours, "encode_batch": theirs}, range(turns), 0)
    rates = {name: size / own.median for name, own in taken.items()}
    return {
        "text_MB": round(size, 1),
        "processes": processes,
        "tokenizers": tokenizers.__version__,
        **{f"{name}_MB_per_s": round(rate, 3) for name, rate in rates.items()},
        "ratio": round(rates["ours"] / rates["encode_batch"], 3),
        "seconds": {name: [round(one, 3) for one in own.seconds] for name, own in taken.items()},
    }


def table(report: dict[str, Any]) -> str:
    """A line for each way to read, and one for tokenizing."""
    own, tokens = report["loading"], report["tokenizing"]
    return "\n".join(
        [
            f"training takes {own['trainer_tokens_per_second']:,} tokens/s",
            *(
                f"{one['source']:<8}{one['packing']:<12}{one['tokens_per_second']:>14,} tokens/s, "
                f"{one['ratio']:,} times as many"
                for one in own["results"]
            ),
            f"tokenizing {tokens['text_MB']} MB: {tokens['ours_MB_per_s']:.2f} MB/s, encode_batch "
            f"alone {tokens['encode_batch_MB_per_s']:.2f} MB/s, ratio {tokens['ratio']}",
        ]
    )


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Measure tokenizing first, while this process is small, and loading."""
    report["tokenizing"] = tokenizing(
        arguments.copies, arguments.files, arguments.vocabulary_size, arguments.turns
    )
    config = load_config(QUICKSTART, arguments.set)
    report["loading"] = loading(config, arguments.iterations)
    return table(report)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {
        "iterations": (10, 1, "iterations of training"),
        "copies": (3, 1, "copies of the text to tokenize"),
        "vocabulary_size": (8192, 256, "vocabulary of the BPE"),
        "turns": (3, 1, "turns of tokenizing"),
    }
    files = {"type": int, "help": "maximum number of files to tokenize (all)"}
    overrides = "override one key of training"
    return reporting.run(
        "data", __doc__, measure, numbers=numbers, options={"--files": files}, overrides=overrides
    )


if __name__ == "__main__":
    sys.exit(main())
