"""A study: runs that are trained once each, what they have come to, and its command line.

Ctrl-C stops, and the same command goes on. A study prints a table and writes its figures, and a
picture of them if it has one.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.benchmarks.harness import reporting
from experiments.paper import drawing, jobs
from experiments.paper.campaign import Campaign
from experiments.paper.jobs import Job
from skippipe_jax.campaign.running import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"


class Study(ABC):
    """Runs, and what they have come to.

    Attributes:
        NAME: that of its module.
        FOLDER: where it works by default, below runs/.
        folder: where it works.
        result: the file of its figures.
        summaries: the folder of committed summaries.
    """

    NAME: ClassVar[str]
    FOLDER: ClassVar[str]

    def __init__(self, folder: Path):
        """`folder` is worked in."""
        self.folder = folder.resolve()
        self.summaries = RESULTS / self.NAME
        self.result = self.summaries.with_suffix(".json")

    @property
    def command(self) -> str:
        """The command that trains it."""
        return f"python -m experiments.paper.{self.NAME}"

    def choose(self, arguments: argparse.Namespace) -> None:  # noqa: B027
        """Take over the arguments that `run` was given for this study alone."""

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """Name all runs, first seeds first."""

    def train(self) -> None:
        """Train what is missing."""
        jobs.train(self.tasks(), self.folder)

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Gather what is written of the runs that have been trained."""


class CampaignStudy(Study):
    """A study beside the campaign.

    Attributes:
        campaign: whose configurations and runs it compares with.
    """

    FOLDER = "paper"

    def __init__(self, folder: Path):
        """`folder` is that of the campaign."""
        super().__init__(folder / self.NAME)
        self.campaign = Campaign(folder, quick=False)

    def job_of(self, name: str, config: Mapping[str, Any]) -> Job:
        """Describe a run that comes from its configuration and its plan alone."""
        return jobs.job_of(name, config, self.summaries, self.folder, self.command)


def run(
    study_of: type[Study],
    documentation: str | None,
    table: Callable[[Any], str],
    draw: Callable[[Any], Figure] | None = None,
    arguments_of: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> int:
    """Parse the command line of a study, and train; returns the exit code.

    `arguments_of` has arguments that it takes besides, each as `add_argument` takes them.
    """
    command = f"python -m experiments.paper.{study_of.NAME}"
    parser = reporting.documented_parser(command, documentation)
    parser.add_argument("--list", action="store_true", help="list the trained runs, and train none")
    for name, how in arguments_of.items():
        parser.add_argument(name, **how)
    folder = Path("runs", study_of.FOLDER)
    parser.add_argument("--folder", type=Path, default=folder, help="working folder (%(default)s)")
    arguments = parser.parse_args()

    def trained() -> int:
        study = study_of(arguments.folder)
        study.choose(arguments)
        if arguments.list:
            jobs.show(study.tasks())
            return 0
        study.train()
        figures = reporting.origin(command) | study.figures()
        write(study.result, figures, draw)
        print(table(figures), study.result, sep="\n")
        return 0

    return jobs.stoppable(trained)


def write(path: Path, figures: dict[str, Any], draw: Callable[[Any], Figure] | None = None) -> None:
    """Write figures as JSON, and the picture of them beside it as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    reporting.write(figures, path)
    if draw is not None:
        draw(figures).savefig(path.with_suffix(".png"), dpi=drawing.DPI)
