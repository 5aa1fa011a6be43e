"""The pages of the documentation: what they tell a reader to do is done, what they say holds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import ModuleType
from typing import get_args
from urllib.parse import urlsplit

import pytest
import yaml
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE
from skippipe_sched.problem.case import OPTIONAL, REQUIRED
from skippipe_sched.problem.open_case import candidates
from skippipe_sched.serving import case as serving

from docs import reference, subpackages, tooltips
from docs.follow import (
    DOCS,
    ROOT,
    Answer,
    Followed,
    before,
    blocks,
    follow,
    is_followed,
    made,
    pictures,
    read,
)
from skippipe_jax import Run
from skippipe_jax.cli.main import parser
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.config import load_config, parse_config
from skippipe_jax.config.parsing import EXTENDS
from skippipe_jax.connections.status import (
    HostPresence,
    HostState,
    LinkStatus,
    Phase,
    Progress,
    RunStatus,
)
from skippipe_jax.experts.config import load_experts
from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.storage.run_dir import MEMBERSHIP
from tests.harness.fork_server import fork_server

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
OTHER_PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "experiments/benchmarks/churn/README.md",
    "experiments/experts/README.md",
    "experiments/launch/README.md",
    "experiments/paper/README.md",
)
CASE_KEYS = {*REQUIRED, *OPTIONAL, "stage_count", "skip_ratio"}
# Drawn of what a clock has a say in: what happened, or a search that its budget may cut.
MEASURED_PICTURES = {
    "tutorial/methods.svg",
    "tutorial/plan.svg",
    "tutorial/flows.svg",
    "tutorial/shares.svg",
    "watch/00000004.svg",
}
COMMENT = re.compile(r"<!--.*?-->", re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIELD = re.compile(r"`(\w+)`")
# Whose commands are started for real; those of others are forked.
FOLLOWED_REALLY = {"timing.md"}
# The other pages, the tutorial and those that go on in its folder among them, take minutes.
FOLLOWED_BY_DEFAULT = {"configuration.md", "formats.md"}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Followed]:
    """Follows a page, once, in a folder of its own."""
    known: dict[str, Followed] = {}
    forking = fork_server().programs

    def at_most_once(page: str) -> Followed:
        if page not in known:
            folder = tmp_path_factory.mktemp(Path(page).stem)
            earlier = before(page)
            if earlier is not None:
                shutil.copytree(at_most_once(earlier).folder, folder, dirs_exist_ok=True)
            programs = None if page in FOLLOWED_REALLY else forking
            known[page] = Followed(folder, follow(page, folder, programs))
        return known[page]

    return at_most_once


# What is run.


@pytest.mark.parametrize(
    "page",
    [
        page if page in FOLLOWED_BY_DEFAULT else pytest.param(page, marks=pytest.mark.nightly)
        for page in filter(is_followed, PAGES)
    ],
)
def test_what_a_page_tells_to_do_can_be_done(page: str, followed: Callable[[str], Followed]):
    found = followed(page)
    assert found.answers
    for picture in pictures(page):
        new, shown = made(picture, found.folder), DOCS / "pictures" / picture
        assert shown.exists()
        if picture not in MEASURED_PICTURES:
            assert new.read_text() == shown.read_text(), f"python -m docs.follow {page}"


def test_every_picture_is_shown_by_the_page_that_makes_it():
    shown = {picture for page in PAGES for picture in pictures(page)}
    kept = {path.relative_to(DOCS / "pictures").as_posix() for path in DOCS.glob("pictures/*/*")}
    assert shown == kept


def answer_to(command: str, found: Followed) -> Answer:
    (answer,) = (answer for answer in found.answers if command in answer.commands)
    return answer


@pytest.mark.nightly
def test_the_tutorial_trains_a_model(followed: Callable[[str], Followed]):
    lines = Run(followed("tutorial.md").folder / "runs" / "first").metrics
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["validation_loss"] < 0.7 * lines[0]["loss"]


@pytest.mark.nightly
def test_the_number_of_hosts_does_not_change_the_losses(followed: Callable[[str], Followed]):
    runs = followed("tutorial.md").folder / "runs"
    one, two = Run(runs / "first").metrics, Run(runs / "two").metrics
    assert [line["loss"] for line in two] == pytest.approx(
        [line["loss"] for line in one[: len(two)]], rel=1e-5
    )


def test_the_tutorial_shows_what_stages_are_good_for():
    results = json.loads((ROOT / "experiments/results/tutorial_evaluation.json").read_text())
    rows = re.findall(r"^\| `(4|null)` \| (.*) \|$", read("tutorial.md"), re.M)
    assert {every: cells.split(" | ") for every, cells in rows} == {
        every: [f"{keep['perplexity']:.2f}" for keep in results[name]["keep"]]
        for every, name in (("4", "full_every_4"), ("null", "never_full"))
    }
    losses = [keep["loss"] for keep in results["full_every_4"]["keep"]]
    assert losses == sorted(losses)
    never = {keep["share"]: keep["perplexity"] for keep in results["never_full"]["keep"]}
    assert min(never, key=never.__getitem__) == 0.75


def test_every_metric_is_told_of():
    rows = re.findall(r"^- (`.*?): ", read("metrics.md"), re.M)
    told = {name for row in rows for name in FIELD.findall(row)}
    assert told == {*StepMetrics.__struct_fields__}


@pytest.mark.nightly
def test_a_run_moves_as_the_page_says(followed: Callable[[str], Followed]):
    found = followed("resume.md")
    lines = Run(found.folder / "runs" / "first").metrics
    assert [line["step"] for line in lines] == list(range(1, 116))


@pytest.mark.nightly
def test_hosts_come_and_go_as_the_page_says(followed: Callable[[str], Followed]):
    folder = followed("churn.md").folder / "runs" / "lasting"
    generations = (folder / MEMBERSHIP).read_text().splitlines()
    assert [json.loads(line)["cause"] for line in generations] == [
        "", "host 2 failed", "host 2 joined", "host 1 left",
    ]  # fmt: skip
    lines = Run(folder).metrics
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    # The host that has joined alone held a stage of it at the end.
    assert latest_step(folder) == len(lines)


@pytest.mark.nightly
def test_fine_tuning_learns_the_answers(followed: Callable[[str], Followed]):
    folder = followed("finetune.md").folder
    losses = [line["loss"] for line in Run(folder / "runs" / "finetune").metrics]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.nightly
def test_the_tuned_model_answers_in_the_form_that_it_was_taught(
    followed: Callable[[str], Followed],
):
    found = followed("finetune.md")
    assert re.fullmatch(r"\d+\.", answer_to("python ask.py", found).stdout.strip())
    config = json.loads((found.folder / "tuned" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.nightly
def test_the_evaluation_names_every_stage(followed: Callable[[str], Followed]):
    evaluation = answer_to("evaluate", followed("finetune.md")).stdout
    assert "all stages in order" in evaluation
    assert [f"without {stage} " in evaluation for stage in range(4)] == [False, True, True, True]


# What is not run here.


def commands_of_others(page: str) -> Iterator[list[str]]:
    """The simple commands of the blocks that are not run, as words."""
    for block in blocks(page):
        if block.language == "bash" and not block.runs:
            for line in block.text.replace("\\\n", " ").splitlines():
                for command in line.split("&&"):
                    yield shlex.split(command, comments=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_for_other_machines_are_right(page: str):
    for words in commands_of_others(page):
        if words[:2] == ["python", "-m"]:
            check_command(words[2], words[3:])
        elif words[0] == "skippipe":
            check_command("skippipe_jax", words[1:])
        elif words[0] == "pip":
            check_installation(words[2:])
        else:
            named = [word for word in words if word.startswith("experiments/")]
            assert named
            assert all((ROOT / word).is_file() for word in named), words


def check_command(module: str, arguments: list[str]) -> None:
    if module == "pytest":
        assert arguments == ["-n", "2"]
        return
    if module == "skippipe_jax.train":
        arguments = [module.partition(".")[2], *arguments]
    # Which ends the test if it does not understand.
    given = parser().parse_args(arguments)
    config = getattr(given, "config", None)
    if config is not None and config.parts[0] == "experiments":
        (load_experts if arguments[0] == "experts" else load_config)(ROOT / config)


def check_installation(arguments: list[str]) -> None:
    words = " ".join(arguments)
    for name in re.findall(r"-r (\S+)", words):
        assert (ROOT / name).is_file()
    text = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"\.\[([\w,]+)\]", words):
        assert all(f"\n{extra} = [" in text for extra in extras.split(","))


def test_every_command_of_a_page_is_one_that_the_reference_tells_of():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"python -m (skippipe_\w+(?:\.\w+)?)", read(page))
    }
    assert named <= {"skippipe_jax.train", "skippipe_sched", "skippipe_jax"}


# What is written from the code.


@pytest.mark.parametrize("module", [reference, subpackages])
def test_what_is_written_from_the_code_is_up_to_date(module: ModuleType):
    for path, text in module.written().items():
        # argparse of later Pythons words --help otherwise than the one that wrote it.
        if path.name != "commands.md" or sys.version_info < (3, 13):
            assert path.read_text(encoding="utf-8") == text, f"run python -m {module.__name__}"


def test_no_other_modules_are_started_than_commands():
    ending = '\nif __name__ == "__main__":\n'
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "skippipe_jax").rglob("*.py")
        if ending in path.read_text()
    }
    started_by_commands = {"skippipe_jax/experts/scoring.py"}
    assert modules == {"skippipe_jax/__main__.py", "skippipe_jax/train.py"} | started_by_commands


def test_every_field_of_cases_and_plans_is_told_of(followed: Callable[[str], Followed]):
    rows = re.findall(r"^- `.*", read("formats.md"), re.M)
    told = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    plan = json.loads((followed("formats.md").folder / "plan.json").read_text())
    assert told >= CASE_KEYS | plan.keys() | plan["predicted"].keys()


def test_every_key_of_the_case_of_a_service_is_told_of():
    told = set(FIELD.findall(read("serve_plan.md")))
    assert told >= {*serving.REQUIRED, *serving.OPTIONAL}
    assert f"`{{{', '.join(serving.OF_HOST)}}}`" in read("serve_plan.md")


def test_every_key_and_word_of_a_status_is_told_of():
    told = set(re.findall(r"`([\w ]+)`", read("watch.md")))
    keys = RunStatus.__struct_fields__ + HostPresence.__struct_fields__
    keys += Progress.__struct_fields__ + LinkStatus.__struct_fields__
    assert told >= {*keys, *get_args(Phase), *get_args(HostState)}


def test_every_exit_code_is_told_of():
    told = re.findall(r"^\| (\d[\d, ]*)", read("commands.md"), re.M)
    codes = {0, INPUT_ERROR_EXIT_CODE, LOST_HOST_EXIT_CODE, 128 + SIGINT, 128 + SIGTERM, 1}
    assert codes == {int(code) for codes in told for code in codes.split(",") if code.strip()}


# What is shown.


@pytest.mark.parametrize("page", PAGES)
def test_yaml_is_a_configuration_or_a_case(page: str, tmp_path: Path):
    earlier = before(page)
    for block in [*(blocks(earlier) if earlier else []), *blocks(page)]:
        if block.title and block.title.endswith((".csv", ".yaml")):
            (tmp_path / block.title).write_text(block.text)
    for block in blocks(page):
        if block.language == "yaml" and block.title != "prometheus.yml":
            tree = yaml.safe_load(block.text)
            # Some sections of a configuration are keys of a case, too.
            if tree.keys() <= CASE_KEYS and "nodes" in tree:
                candidates(tree, tmp_path)
            elif "slots" in tree:
                serving.parse_serving_case(tree, tmp_path)
            elif "domains" in tree:
                path = tmp_path / "experts.yaml"
                path.write_text(block.text)
                load_experts(path)
            elif EXTENDS in tree and block.title:
                load_config(tmp_path / block.title)
            else:
                parse_config(tree)


def links(page: Path) -> Iterator[str]:
    """Where the links on a page lead, but not in its blocks and comments."""
    yield from LINK.findall(FENCED.sub("", COMMENT.sub("", page.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), *OTHER_PAGES])
def test_links_lead_somewhere(page: str):
    for link in links(ROOT / page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            assert re.fullmatch(r"(\w[\w-]*\.)+[a-z]{2,}", parts.netloc), link
            assert not re.search(r"example|localhost|placeholder|your", parts.netloc), link
        elif parts.path:
            assert (ROOT / page).parent.joinpath(parts.path).is_file(), link


def test_the_first_mention_of_a_term_on_a_page_shows_its_meaning():
    page = (
        "<h2>A host</h2><p>On <code>node</code> and host &amp; "
        "<a href='x'>nodes</a>: Nodes, hosts.</p>"
    )
    told = {"host": 'a "process"', "node": "a device", "data node": "of the data stage"}
    assert tooltips.marked(page, told) == (
        "<h2>A host</h2><p>On <code>node</code> and "
        '<abbr title="a &quot;process&quot;">host</abbr> &amp; '
        "<a href='x'>nodes</a>: <abbr title=\"a device\">Nodes</abbr>, hosts.</p>"
    )


def test_every_term_of_the_glossary_is_used_on_another_page():
    pages = [page for page in DOCS.glob("*.md") if page != tooltips.GLOSSARY]
    text = " ".join(" ".join(page.read_text(encoding="utf-8").lower().split()) for page in pages)
    assert [term for term in tooltips.meanings() if term not in text] == []
    assert set(tooltips.meanings()) > tooltips.AMBIGUOUS


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sched")])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "configuration" / "index.html").read_text()
    assert "skip_above_norm" in page
    assert "<abbr title=" in page
    assert (tmp_path / "site" / "experiments" / "launch" / "slurm.sbatch").is_file()
    for html in (tmp_path / "site").rglob("*.html"):
        # Nothing is fetched from elsewhere by who reads it.
        fetched = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', html.read_text()
        )
        assert not fetched, html


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("churn.md", "When a host is lost"),
        ("churn.md", "What else may fail"),
        ("protocol.md", "What must hold"),
    ],
)
def test_what_survives_what_is_shown_by_tests(page: str, section: str):
    """Each line of the table names the tests that show it, and these exist."""
    _, told = (DOCS / page).read_text(encoding="utf-8").split(f"## {section}\n")
    told = told.split("\n## ")[0]
    _, _, *rows = [line for line in told.splitlines() if line.startswith("|")]
    assert rows
    for row in rows:
        _, _, _, shown, _ = row.split("|")
        named = re.findall(r"`(\S+\.py)`: ((?:`test_\w+`(?:, )?)+)", shown)
        assert named, row
        for module, tests in named:
            defined = (ROOT / "tests" / module).read_text(encoding="utf-8")
            for test in re.findall(r"test_\w+", tests):
                assert f"def {test}(" in defined, f"{module}: {test}"
