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
        FOLDER: where it works by default, below runs/; a quick study in FOLDER_quick.
        QUICK: what --quick makes small; None where there is no such option.
        folder: where it works.
        quick: whether it is small, and its results stay in the folder.
        result: the file of its figures.
        summaries: the folder of committed summaries.
    """

    NAME: ClassVar[str]
    FOLDER: ClassVar[str]
    QUICK: ClassVar[str | None] = None

    def __init__(self, folder: Path, quick: bool = False):
        """`folder` is worked in."""
        self.folder, self.quick = folder.resolve(), quick
        committed = RESULTS / self.NAME
        self.summaries = self.folder / "summaries" if quick else committed
        self.result = (self.folder / self.NAME if quick else committed).with_suffix(".json")

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

    FOLDER, QUICK = "paper", "small models, one seed"

    def __init__(self, folder: Path, quick: bool = False):
        """`folder` is that of the campaign."""
        super().__init__(folder / self.NAME, quick)
        self.campaign = Campaign(folder, quick)

    def job_of(self, name: str, config: Mapping[str, Any]) -> Job:
        """Describe a run that comes from its configuration and its plan alone."""
        where = self.summaries, self.folder
        return jobs.job_of(name, config, *where, self.command, self.quick)


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
    default = f"runs/{study_of.FOLDER}"
    if study_of.QUICK is not None:
        parser.add_argument("--quick", action="store_true", help=study_of.QUICK)
        default += ", with _quick"
    for name, how in arguments_of.items():
        parser.add_argument(name, **how)
    parser.add_argument("--folder", type=Path, help=f"working folder ({default})")
    arguments = parser.parse_args()
    is_quick = study_of.QUICK is not None and arguments.quick

    def trained() -> int:
        folder = Path("runs", study_of.FOLDER + ("_quick" if is_quick else ""))
        study = study_of(arguments.folder or folder, is_quick)
        study.choose(arguments)
        if arguments.list:
            jobs.show(study.tasks())
            return 0
        study.train()
        given = f"{command} --quick" if is_quick else command
        figures = reporting.origin(given) | study.figures()
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
