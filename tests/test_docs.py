"""What the pages of the documentation tell a reader to run, run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skippipe_jax import run_folder

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\S+\.py)\n")
PATIENCE_S = 200


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder in which docs/finetune.md was followed, and what each command printed."""
    folder = tmp_path_factory.mktemp("finetune")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sources = os.pathsep.join(map(str, (DOCS.parent, DOCS.parent / "sched")))
    environment = os.environ | {"PATH": path, "PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"}
    said = []
    for language, text in blocks("finetune.md"):
        if language == "python":
            named = FILE.match(text)
            assert named, text
            (folder / named[1]).write_text(text)
        elif not text.startswith("pip install"):  # as whoever runs the tests has done
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            said.append(done.stdout)
    return folder, said


def test_fine_tuning_learns_the_answers(finetuned: tuple[Path, list[str]]):
    folder, _ = finetuned
    losses = [line["loss"] for line in run_folder.read_metrics(folder / "runs" / "finetune")]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]


def test_the_tuned_model_answers_in_the_form_that_it_was_taught(
    finetuned: tuple[Path, list[str]],
):
    folder, said = finetuned
    assert re.fullmatch(r"\d+\.", said[-1].strip())
    config = json.loads((folder / "tuned" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_the_evaluation_names_every_stage(finetuned: tuple[Path, list[str]]):
    evaluation = finetuned[1][3]
    assert "all stages in order" in evaluation
    assert [f"without {stage} " in evaluation for stage in range(4)] == [False, True, True, True]
