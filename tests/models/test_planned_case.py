"""What a case says of bytes follows from the configuration that it is in, or is held against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from skippipe_sched.errors import InputError
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.timing.simulate import simulate_plan

from experiments.paper import shapes
from experiments.paper.jobs import REPOSITORY
from skippipe_jax.config import Config, load_config, parse_config
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.models.planned_case import (
    configured_cases,
    matches_configured_case,
    size_mismatches,
)
from skippipe_jax.training.planning import plan_of

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
OPEN: dict[str, Any] = {
    "nodes": 5,
    "locations": ["Belgium", "Iowa"],
    "links": "gcp12",
    "forward_s": 0.1,
    "stages": [2, 3],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}
HOP = 2 * 32 * 16 * 4
TOKENS = 2 * 32
# What a token takes in a hop forward and in a hop back, and a number in averaging.
FORMATS = [
    ({}, 64, 64, 4),
    ({"network": {"activation_dtype": "bfloat16", "averaging_dtype": "bfloat16"}}, 32, 32, 2),
    ({"data": {"packing": "documents"}}, 68, 68, 4),
    ({"network": {"activation_dtype": "int8"}}, 16 + 2, 16 + 2, 4),
    ({"network": {"activation_dtype": "int8", "gradient_dtype": "bfloat16"}}, 16 + 2, 32, 4),
    (
        {"network": {"gradient_dtype": "int8"}, "data": {"packing": "documents"}},
        68,
        16 + 1 + 2,
        4,
    ),
]


def config_of(case: Any, **sections: Any) -> Config:
    data = {"sequence_length": 32, "microbatch_size": 2, **sections.pop("data", {})}
    plan = {"case": case, "method": "balanced"}
    return parse_config({"model": MODEL, "plan": plan, "data": data, **sections})


def case_of(config: Config, folder: Path = Path()) -> Case:
    case, *_ = configured_cases(config, folder)
    return case


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"activation_bytes": "auto", "stage_bytes": "auto"},
        {"activation_bytes": "auto", "gradient_bytes": "auto"},
    ],
)
@pytest.mark.parametrize(("sections", "forward", "back", "averaged_width"), FORMATS)
def test_bytes_follow_from_the_configuration(
    said: dict[str, str],
    sections: dict[str, Any],
    forward: int,
    back: int,
    averaged_width: int,
):
    config = config_of(OPEN | said, **sections)
    case, stages = case_of(config), stage_shapes(config.model, 2)
    assert (case.activation_bytes, case.gradient_bytes) == (TOKENS * forward, TOKENS * back)
    assert list(case.stage_bytes) == [averaged_width * parameter_count(stage) for stage in stages]
    assert case.stage_bytes[0] > 2 * case.stage_bytes[1]
    # The plan carries figures, whoever reads it then.
    assert case.source["activation_bytes"] == case.activation_bytes
    assert size_mismatches(config, case) == []


def test_a_case_in_a_file_is_filled_in_too(tmp_path: Path):
    links = "location_a,location_b,latency_ms,bandwidth_GiB_per_s\nBelgium,Iowa,50,0.1\n"
    (tmp_path / "mine.csv").write_text(links)
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(OPEN | {"links": "mine.csv"}))
    assert case_of(config_of(str(tmp_path / "case.yaml"))).activation_bytes == HOP


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"forward_s": 0.2}, False),
        ({"links": [["Belgium", "Iowa", 50, 0.5]]}, False),
        ({"memory": 3}, False),
        ({"activation_bytes": 1e5}, False),
    ],
)
def test_a_case_is_known_again_until_what_it_says_changes(change: dict[str, Any], is_same: bool):
    saved = json.loads(json.dumps(dict(case_of(config_of(OPEN)).source)))
    case = parse_case(saved)
    assert matches_configured_case(config_of(OPEN | change), Path(), case) == is_same


def test_a_case_is_known_again_though_what_it_leaves_open_is_filled_in_otherwise():
    given = OPEN | {"memory": "auto", "nodes": [{"memory_bytes": 1e9}] * 5}
    saved = dict(case_of(config_of(given)).source)
    assert matches_configured_case(config_of(given), Path(), parse_case(saved))
    nodes = [{**node, "memory": node["memory"] + 1} for node in saved["nodes"]]
    other = parse_case(saved | {"nodes": nodes, "stage_bytes": 1.0})
    assert matches_configured_case(config_of(given), Path(), other)
    nodes = [{**node, "memory_bytes": 2e9} for node in saved["nodes"]]
    assert not matches_configured_case(
        config_of(given), Path(), parse_case(saved | {"nodes": nodes})
    )


def test_a_figure_of_its_own_is_compared():
    inner = int(case_of(config_of(OPEN)).stage_bytes[1])

    def said_of(activation_bytes: float, stage_bytes: Any) -> list[str]:
        given = OPEN | {"activation_bytes": activation_bytes, "stage_bytes": stage_bytes}
        config = config_of(given)
        return size_mismatches(config, case_of(config))

    right = list(case_of(config_of(OPEN)).stage_bytes)
    assert said_of(HOP, right) == said_of(0.96 * HOP, [1.04 * size for size in right]) == []
    [of_hop] = said_of(1, right)
    assert of_hop.startswith(f"case.activation_bytes = 1, but the configuration gives {HOP}")
    assert of_hop.endswith("set it to auto")
    [of_stage] = said_of(HOP, [right[0], 7])
    assert of_stage.startswith(f"case.stage_bytes[1] = 7, but the configuration gives {inner}")
    assert of_stage.endswith("set it to auto")


def test_gradients_have_what_activations_have_unless_a_case_speaks_of_them():
    network = {"activation_dtype": "int8", "gradient_dtype": "bfloat16"}
    forward, back = TOKENS * (16 + 2), TOKENS * 32

    def said_of(**sizes: Any) -> tuple[float, list[str]]:
        config = config_of(OPEN | sizes, network=network)
        case = case_of(config)
        return case.gradient_bytes, size_mismatches(config, case)

    assert said_of(activation_bytes=forward, gradient_bytes="auto") == (back, [])
    assert said_of(gradient_bytes=back) == (back, [])
    found, [sentence] = said_of(activation_bytes=forward)
    assert found == forward
    assert sentence.startswith(f"case.gradient_bytes = {forward}, but the configuration gives")
    assert sentence.endswith("Set it to auto")


OUTER: dict[str, Any] = {"mode": "outer", "every": 10, "fragments": 2}


@pytest.mark.parametrize("said", [{}, {"averaging": "auto"}])
def test_averaging_follows_from_the_configuration(said: dict[str, str]):
    exact = case_of(config_of(OPEN | said))
    assert not exact.averaging.is_outer
    assert exact.source == case_of(config_of(OPEN)).source
    assert "averaging" not in exact.source
    config = config_of(OPEN | said, averaging=OUTER)
    case = case_of(config)
    assert case.averaging == config.averaging.policy
    # The plan carries it, and the bytes are of numbers in float32, however they travel.
    assert case.source["averaging"] == OUTER | {"delay": 1, "dtype": "int8"}
    assert case.stage_bytes == exact.stage_bytes
    assert size_mismatches(config, case) == []


def test_another_averaging_is_told_of():
    exact, outer = (config_of(OPEN, averaging=own) for own in ({}, OUTER))
    [sentence] = size_mismatches(outer, case_of(exact))
    assert sentence.startswith('case.averaging = exact, but the configuration gives {"mode"')
    assert sentence.endswith("set it to auto")
    [sentence] = size_mismatches(exact, case_of(outer))
    assert ", but the configuration gives exact: " in sentence
    other = config_of(OPEN, averaging=OUTER | {"dtype": "float32"})
    assert len(size_mismatches(other, case_of(outer))) == 1
    # What a plan does not depend on: the outer optimizer.
    other = config_of(OPEN, averaging=OUTER | {"rate": 1, "momentum": 0, "exact_steps": 3})
    assert size_mismatches(other, case_of(outer)) == []
    said = size_mismatches(config_of(OPEN | {"averaging": OUTER}), case_of(outer))
    assert [own.partition(" = ")[0] for own in said] == ["case.averaging"]


@pytest.mark.parametrize(
    ("averaging", "remedy"), [({}, "without averaging"), (OUTER, '"every": 10,')]
)
def test_a_plan_of_another_averaging_is_told_the_right_one(averaging: Any, remedy: str):
    case = case_of(config_of(OPEN, averaging=OUTER | {"every": 7} if averaging else OUTER))
    given = {"model": MODEL, "plan": {"file": "plan.json"}, "averaging": averaging}
    config = parse_config(given | {"data": {"sequence_length": 32, "microbatch_size": 2}})
    [sentence] = size_mismatches(config, case)
    assert "Plan again with" in sentence
    assert remedy in sentence


def test_more_fragments_than_blocks_are_refused():
    with pytest.raises(InputError, match="stage 0 has 2 blocks") as caught:
        case_of(config_of(OPEN, averaging=OUTER | {"fragments": 3}))
    assert caught.value.field == "averaging.fragments"
    case_of(config_of(OPEN | {"stages": [1, 4]}, averaging=OUTER))


def test_what_no_plan_depends_on_is_not_compared():
    """A stage with one replica averages nothing, and a pipeline of one stage sends nothing."""
    case = OPEN | {"nodes": 3, "stages": [1, 2], "activation_bytes": HOP}
    config = config_of(case | {"stage_bytes": [7, case_of(config_of(case)).stage_bytes[1]]})
    assert size_mismatches(config, case_of(config)) == []
    alone = OPEN | {"nodes": 1, "stages": [1], "path_length": 1}
    config = config_of(alone | {"activation_bytes": 0, "stage_bytes": 0})
    assert size_mismatches(config, case_of(config)) == []


def test_a_plan_that_was_made_before_is_told_the_right_figures():
    given = OPEN | {"activation_bytes": 1, "stage_bytes": 7}
    case = case_of(config_of(given))
    right = [int(size) for size in case_of(config_of(OPEN)).stage_bytes]
    config = parse_config({"model": MODEL, "plan": {"file": "plan.json"}, "data": {
        "sequence_length": 32, "microbatch_size": 2}})  # fmt: skip
    of_hop, of_stages = size_mismatches(config, case)
    assert of_hop.endswith(f"activation_bytes: {HOP}")
    assert of_stages.endswith(f"stage_bytes: {json.dumps(right)}")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stages": 3}, "case.stages"),
        ({"stages": []}, "case.stages"),
        ({"stages": "auto", "stage_count": "two"}, "case.stage_count"),
        ({"stages": [2, 2, 1]}, "model.layers"),
        ({"activation_bytes": "much"}, "case.activation_bytes"),
        ({"stage_bytes": None}, "case.stage_bytes"),
        ({"depth": 3}, "case.depth"),
    ],
)
def test_a_wrong_case_is_refused_for_what_is_wrong_with_it(change: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        configured_cases(config_of(OPEN | change), Path())
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["quickstart", *(f"paper/configs/{m}" for m in shapes.MODELS)])
def test_committed_configurations_are_planned_for_what_they_train(name: str):
    path = REPOSITORY / "experiments" / f"{name}.yaml"
    config = load_config(path)
    assert size_mismatches(config, case_of(config, path.parent)) == []


def test_the_first_picture_of_the_docs_is_of_the_quickstart():
    path = REPOSITORY / "experiments" / "quickstart.yaml"
    plan = plan_of(load_config(path), path.parent)
    shown = REPOSITORY / "experiments" / "results" / "quickstart_plan.svg"
    assert shown.read_text() == gantt(plan, simulate_plan(plan))
