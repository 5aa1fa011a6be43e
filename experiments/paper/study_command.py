"""A study beside the campaign, and its command line.

A study trains what is missing as the campaign's runs are trained: Ctrl-C stops, and the same
command goes on. It prints a table and writes its figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.benchmarks.harness import reporting
from experiments.paper import jobs
from experiments.paper.campaign import Campaign

RESULTS = Path(__file__).parent / "results"


class Study(ABC):
    """Runs, and what they have come to.

    Attributes:
        campaign: whose configurations and runs it compares with.
        folder: where it works.
        result: the file of its figures, which stays in the folder if the study is quick.
        summaries: the folder of committed summaries; that of a quick study stays there too.
    """

    NAME: ClassVar[str]

    def __init__(self, folder: Path, quick: bool):
        """`folder` is worked in."""
        self.campaign = Campaign(folder, quick)
        self.folder = self.campaign.folder / self.NAME
        committed = RESULTS / self.NAME
        self.summaries = self.folder / "summaries" if quick else committed
        self.result = (self.folder / self.NAME if quick else committed).with_suffix(".json")

    @property
    def command(self) -> str:
        """The command that trains it."""
        return f"python -m experiments.paper.{self.NAME}"

    @abstractmethod
    def train(self) -> dict[str, Any]:
        """Train what is missing; returns the figures of all."""


def run(
    study_of: type[Study],
    documentation: str | None,
    table: Callable[[Mapping[str, Any]], str],
    quick: str = "small models, one seed",
) -> int:
    """Parse the command line of a study, and train; returns the exit code.

    `quick` says what --quick makes small.
    """
    command = f"python -m experiments.paper.{study_of.NAME}"
    parser = reporting.documented_parser(command, documentation)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--folder", type=Path, help="working folder (runs/paper, runs/paper_quick)")
    arguments = parser.parse_args()

    def trained() -> int:
        folder = arguments.folder or Path("runs", "paper_quick" if arguments.quick else "paper")
        study = study_of(folder, arguments.quick)
        figures = study.train()
        given = f"{command}{' --quick' if arguments.quick else ''}"
        study.result.parent.mkdir(parents=True, exist_ok=True)
        reporting.write(reporting.origin(given) | figures, study.result)
        print(table(figures), study.result, sep="\n")
        return 0

    return jobs.stoppable(trained)
