"""Gated runs as tasks of a campaign: each is trained once, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.paper import jobs, study_text
from experiments.paper.gates import GatedRun, state_of
from skippipe_jax.campaign.running import ONE_THREAD
from skippipe_jax.config.resume import json_digest


@dataclass(frozen=True)
class GatedTask:
    """A gated run that is trained where its result is missing.

    Attributes:
        name: of its files.
        run: what is trained.
        results: the folder of its result.
        work_folder: where texts and states are kept.
        command: what makes the result, as the result says.
        text: one of those of `study_text`.
        start: whose last weights are the first ones.
    """

    name: str
    run: GatedRun
    results: Path
    work_folder: Path
    command: str
    text: str = study_text.ALL
    start: GatedTask | None = None

    @property
    def of_text(self) -> dict[str, str]:
        """Say which text it reads and whose weights it starts from, where that is unusual."""
        start = {} if self.start is None else {"start": self.start.name}
        return ({"text": self.text} if self.text else {}) | start

    @property
    def digest(self) -> str:
        """Compute what the results of equal runs have in common."""
        # Without a text or a start of their own, results have the digests that they always had.
        start = {} if self.start is None else {"start": self.start.digest}
        return json_digest(asdict(self.run) | self.of_text | start)

    @property
    def output(self) -> Path:
        """The file of the result."""
        return self.results / f"{self.name}.json"

    @property
    def needs(self) -> tuple[str, ...]:
        """Name the task whose weights it starts from."""
        return () if self.start is None else (self.start.name,)

    @property
    def work(self) -> float:
        """Blocks that it runs."""
        return self.run.compute() * self.run.blocks

    def result(self) -> dict[str, Any] | None:
        """Read the result, if there is one of this very run."""
        return jobs.read_result(self.output, self.digest)

    def is_done(self) -> bool:
        """Tell whether the result is there."""
        return self.result() is not None

    def environment(self) -> Mapping[str, str]:
        """Give the process one thread, and the programs that other runs have compiled."""
        return ONE_THREAD | {"JAX_COMPILATION_CACHE_DIR": str(self.work_folder / "programs")}

    def commands(self) -> list[Callable[[], Sequence[str]]]:
        """Train and write the result."""
        return [self._training]

    def found(self) -> str:
        """Tell the loss of the full model."""
        result = self.result()
        assert result is not None, self.name
        return f"validation loss {result['losses']['validation']:.4f}"

    def _training(self) -> Sequence[str]:
        path = self.work_folder / "specified" / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        given = {"digest": self.digest, "command": self.command, "run": asdict(self.run)}
        given |= self.of_text
        path.write_text(json.dumps(given), encoding="utf-8")
        folders = ["--work", str(self.work_folder), "--output", str(self.output)]
        return ["experiments.paper.gates", str(path), *folders]


class Pretraining(GatedTask):
    """A gated run that is done only while the state is there that others start from."""

    def is_done(self) -> bool:
        """Tell whether the result and the state are there."""
        return super().is_done() and state_of(self.work_folder, self.name).exists()


def write_texts(texts: Iterable[str], folder: Path) -> None:
    """Write the texts that are missing, once, before processes read them."""
    for text in {*texts}:
        study_text.read(folder / "text", text)


def train(tasks: Sequence[GatedTask], folder: Path) -> None:
    """Train what is missing, two runs at a time; Ctrl-C stops, and the next call goes on."""
    write_texts((task.text for task in tasks), folder)
    jobs.train(tasks, folder)
