"""What ``skippipe experts`` refuses, in one line each, before anything trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from skippipe_sched.errors import TEMPORARY_EXIT_CODE

from skippipe_jax.experts import work
from skippipe_jax.interop.huggingface import CONFIG as HF_CONFIG
from skippipe_jax.storage.run_lock import RunLock
from tests.commands.examples import expect_one_error
from tests.experts.conftest import Run
from tests.experts.examples import CONFIG, place_in, write_config

ARM = {"size": "S", "steps": 4}


def arm(**keys: Any) -> dict[str, Any]:
    return {"arms": {"equal": ARM | keys}}


def both(**keys: Any) -> dict[str, Any]:
    return {"arms": {"equal": ARM, "other": keys}}


def run_with(**sections: Any) -> dict[str, Any]:
    return {"run": CONFIG["run"] | sections}


def domains_with(**keys: Any) -> dict[str, Any]:
    first, *others = CONFIG["domains"]
    return {"domains": [first | keys, *others]}


# Each: sections that are others, and what the error says, with "..." for the rest.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lane": {}}, "config.lane...unknown key"),
    (arm(step=3), "arms.equal.step...unknown key"),
    (run_with(modle={}), "config.modle...unknown key"),
    (run_with(run_dir="x"), "run.run_dir = 'x'...Remove it"),
    (run_with(checkpoint={"copy_to": "memory://x"}), "run.checkpoint.copy_to...for all runs"),
    (run_with(validation={"every": 5, "patience": 2}), "run.validation.patience...Remove it"),
    (run_with(seed=3), "run.seed = 3...seed of the ensemble"),
    ({"experts": {"train": {"steps": 3}}}, "experts.train...arms.NAME.steps"),
    ({"seeds": {"run": {"init_from": "hf:x"}}}, "seeds.run.init_from...seeds.init_from"),
    (run_with(data={"path": "x"}), "run.data.path = 'x'...domains set"),
    (run_with(data=None), "run.data = None...is not a mapping"),
    ({"experts": {"data": {"held_out": 0.1}}}, "experts.data.held_out = 0.1...run.data"),
    ({"experts": {"model": {"ffn_width": 8}}}, "experts.model.ffn_width = 8...in sizes"),
    ({"domains": []}, "domains = []...at least 1"),
    (domains_with(name=None), "domains[0].name...NAME"),
    (domains_with(name="code"), "domains[0].name = 'code'...two"),
    (domains_with(name="seed"), "domains[0].name = 'seed'...another"),
    (domains_with(name="a/b") | {"lanes": "random"}, "domains = 'a/b'...file names"),
    (domains_with(path=None), "domains.prose.path = None...file"),
    (domains_with(path="text/no"), "domains.prose.path...text/no"),
    (domains_with(path="little"), "sequence_length = 16: the training text of little has 4"),
    (domains_with(path="few"), "the held-out text for ... of the domain prose has "),
    (
        {"domains": [*CONFIG["domains"][:3], {"name": "letters", "path": "no"}]},
        "domains.letters.path = ...No such file",
    ),
    (
        run_with(data=CONFIG["run"]["data"] | {"microbatch_size": 500}),
        "too few for a microbatch of 500",
    ),
    (domains_with(weight=0), "domains.prose.weight = 0"),
    ({"outside": [one["name"] for one in CONFIG["domains"]]}, "outside = ...no domain"),
    ({"outside": ["poems"]}, "outside[0] = 'poems'...is not a domain"),
    ({"outside": ["letters"] * 2}, "outside[1] = 'letters'...twice"),
    ({"sizes": {}}, "sizes = None...is missing"),
    ({"arms": {}}, "arms = None...is missing"),
    ({"sizes": CONFIG["sizes"] | {"S": {"layers": 3}}}, "model.layers = 3...2 stages"),
    ({"sizes": CONFIG["sizes"] | {"S": {"vocabulary_size": 9}}}, "vocabulary_size = 9"),
    (arm(size="M"), "arms.equal.size = 'M'...is not a size...S, L"),
    ({"arms": {"equal": {}}}, "arms.equal.size = None...is not a size"),
    (arm(size={"easy": "S", "hard": "M"}), "arms.equal.size = 'M'...is not a size"),
    (arm(size={"easy": "S"}), "arms.equal.size...Add hard"),
    (arm(steps={"easy": 1, "medium": 1, "hard": 1}), "steps = 'medium'...is not a lane"),
    (arm(steps=0), "arms.equal.steps = 0...at least 1"),
    (arm(steps="many"), "arms.equal.steps = 'many'...whole number"),
    ({"lanes": {"easy": ["letters"]}}, "lanes.easy = 'letters'"),
    (
        {"lanes": {"easy": ["prose", "code", "prose"], "hard": ["tables"]}},
        "lanes.easy = 'prose'...is also in lane easy...once",
    ),
    (
        {"lanes": {"easy": ["prose", "code"], "hard": ["tables", "code"]}},
        "lanes.hard = 'code'...also in lane easy",
    ),
    ({"lanes": {"easy": ["prose"], "hard": ["tables"]}}, "code is not in any lane...outside"),
    ({"lanes": "sorted"}, "lanes = 'sorted'...measured"),
    (
        arm(begins={"prose": "tables", "tables": "code"}),
        "arms.equal.begins = 'prose from tables from code from prose'...start from each other",
    ),
    (arm(begins={"tables": "poems"}), "begins = 'poems'"),
    (arm(begins={"letters": "prose"}), "begins = 'letters'"),
    (arm(begins={"tables": "code"}, lanes="measured"), "begins = 'tables'...measured"),
    (
        arm(begins={"tables": "code"}, size={"easy": "S", "hard": "L"}),
        "arms.equal.begins = 'code'...has size S, but tables has size L",
    ),
    (both(kind="sparse", size="S"), "arms.other.kind = 'sparse'...dense"),
    (both(kind="dense", size={"easy": "S", "hard": "S"}), "size...one value"),
    (both(kind="dense", size="S", lanes="random"), "other.lanes = 'random'...dense"),
    (both(kind="scratch", size="S", by_difficulty=True), "other.by_difficulty = True"),
    (both(kind="averaged"), "arms.other.of = None...Name the arm"),
    (both(kind="averaged", of="other"), "arms.other.of = 'other'"),
    (both(kind="averaged", of="equal", size="S"), "other.size = 'S'"),
    (both(size="S", of="equal"), "arms.other.of = 'equal'...Remove it"),
    (
        {
            "arms": {
                "equal": ARM | {"size": {"easy": "S", "hard": "L"}},
                "mean": {"kind": "averaged", "of": "equal"},
            }
        },
        "arms.mean.of = 'equal'...differ in size",
    ),
    ({"probe": {"size": "M"}}, "probe.size = 'M'"),
    ({"evaluation": {"decay": 1}}, "evaluation.decay = 1"),
    ({"nodes": {"budget_s": 1}}, "nodes.case = ''...is missing"),
    ({"nodes": {"case": "x"}, "lanes": "measured"}, "nodes.case = 'x'...No such file"),
    ({"nodes": {"case": {"nodes": 3}}, "lanes": "measured"}, "case...missing"),
    ({"seeds": {"init_from": {"S": "elsewhere"}}}, "init_from = 'elsewhere'...hf:DIR"),
    ({"seeds": {"init_from": {"M": "hf:x"}}}, "seeds.init_from = 'M'"),
    ({"seeds": {"init_from": {"S": "run:gone"}}}, "init_from = 'gone'...not contain a run"),
    ({"seeds": {"init_from": {"S": "run:begun"}}}, "init_from = ...does not exist"),
    ({"seeds": {"init_from": {"S": "hf:gone"}}}, "init_from = 'gone'...is not a local folder"),
    ({"prepare": "no.such"}, "prepare = 'no.such'...No mod"),
    ({"prepare": "this"}, "domains.prose.path"),
]


@pytest.mark.parametrize(("sections", "told"), REFUSED)
def test_what_is_wrong_is_said_before_anything_trains(
    sections: dict[str, Any],
    told: str,
    folder: Path,
    experts_command: Run,
    monkeypatch: pytest.MonkeyPatch,
):
    def trains(*_: Any) -> None:
        raise AssertionError("something trains")

    monkeypatch.setattr(work, "run_all", trains)
    if sections.get("prepare") == "this":  # It writes nothing.
        shutil.rmtree(folder / "text")
    (folder / "little").write_text("abc")
    (folder / "few").mkdir()
    for document in "ab":
        (folder / "few" / document).write_text(document * 22)
    run = {"model": CONFIG["run"]["model"], "data": {"sequence_length": 16}}
    (folder / "begun").mkdir()
    (folder / "begun" / "config.yaml").write_text(yaml.safe_dump(run))
    write_config(folder, **sections)
    expect_one_error(experts_command("experts.yaml"), *told.split("..."))
    assert not (folder / "experts" / "runs").exists()


@pytest.mark.parametrize("action", ["train", "evaluate", "probe", "plan", "export"])
def test_no_action_ends_with_a_traceback(action: str, folder: Path, experts_command: Run):
    expect_one_error(experts_command(action, "nowhere.yaml"), "CONFIG = 'nowhere.yaml'")
    (folder / "experts.yaml").write_text("- domains\n")
    expect_one_error(experts_command(action, "experts.yaml"), "is not a mapping")
    write_config(folder)
    expect_one_error(experts_command(action, "experts.yaml", "--set", "arms.equal.steps=0"), "= 0")
    if action in ("evaluate", "export"):
        untrained = ["has not been trained", "Run skippipe experts CONFIG"]
        expect_one_error(experts_command(action, "experts.yaml"), *untrained)
        write_config(folder, nodes={"case": CONFIG["run"]["plan"]["case"]})
        expect_one_error(experts_command(action, "experts.yaml"), "has no division of nodes yet")
        assert not (folder / "experts").exists()
    if action == "plan":
        expect_one_error(experts_command(action, "experts.yaml"), "nodes = None", "case: FILE")
        write_config(folder, lanes="measured")
        expect_one_error(experts_command(action, "experts.yaml"), "has not been trained")


def write_model(folder: Path, name: str, vocabulary: dict[str, int]) -> None:
    """The folder of a Hugging Face model as far as it is looked at: shapes and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    (folder / name).mkdir()
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    own.save(str(folder / name / "tokenizer.json"))
    shapes = CONFIG["run"]["model"]
    told = {
        "model_type": "llama", "hidden_size": shapes["width"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 24,
        "vocab_size": 300, "max_position_embeddings": 16,
    }  # fmt: skip
    (folder / name / HF_CONFIG).write_text(json.dumps(told))


def test_unequal_tokenizers_are_refused(
    folder: Path, experts_command: Run, monkeypatch: pytest.MonkeyPatch
):
    words = {word: number for number, word in enumerate(["<s>", "</s>", "a", "b"])}
    write_model(folder, "one", words)
    monkeypatch.setattr(work, "open_initial_weights", lambda *_, **__: None)
    run = CONFIG["run"] | {"model": {}}
    sections = {"run": run, "sizes": {"S": {}, "L": {}}, **arm(size={"easy": "S", "hard": "L"})}
    given = {"S": "hf:one", "L": "run:trained"}
    (folder / "trained").mkdir()
    own = {"model": CONFIG["run"]["model"] | {"vocabulary_size": 300}, "data": {"path": "x"}}
    own["data"] |= {"source": "text", "sequence_length": 16}
    (folder / "trained" / "config.yaml").write_text(yaml.safe_dump(own))
    write_config(folder, **sections, seeds={"init_from": given})
    expect_one_error(
        experts_command("experts.yaml"),
        "sizes = 'S (one), L (bytes)'", "tokenizers differ", "the same data.tokenizer",
    )  # fmt: skip


def test_experts_behind_the_first_have_what_comes_with_a_given_seed(folder: Path):
    """The shapes and the tokenizer of a whole lane are those of the model that it began with."""
    write_model(folder, "one", {"<s>": 0, "</s>": 1, "a": 2})
    run = {**CONFIG["run"], "model": {}}
    place = place_in(folder, run=run, sizes={"S": {}}, seeds={"init_from": {"S": "hf:one"}})
    [arm] = work.MemberFactory(place.config).arms()
    for member in arm.members.values():
        told = member.config()
        assert told.model.ffn_width == 24
        assert told.data.tokenizer == "one"


def test_an_ensemble_in_use_is_told_so(folder: Path, experts_command: Run):
    with RunLock(folder / "experts") as lock:
        lock.acquire()
        result = experts_command("experts.yaml")
    expect_one_error(result, "folder = ", "--set folder=", code=TEMPORARY_EXIT_CODE)


def test_text_is_written_once_by_each_program(folder: Path, experts_command: Run):
    place = place_in(folder, prepare="writer")
    (folder / "writer.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "path = Path(sys.argv[1], 'count')\n"
        "path.write_text(path.read_text() + 'x' if path.exists() else 'x')\n"
    )
    (folder / "experts").mkdir()
    for _ in range(2):
        work.prepare(place)
    assert (place.folder / "text" / "count").read_text() == "x"
    (folder / "writer.py").rename(folder / "other.py")
    work.prepare(place_in(folder, prepare="other"))
    assert (place.folder / "text" / "count").read_text() == "xx"
