"""Which runs arms consist of: lanes, chains of parents, steps, and what makes two runs one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.config.parsing import _parse
from skippipe_jax.experts import difficulty
from skippipe_jax.experts.config import ArmConfig, ExpertsConfig, load_experts
from skippipe_jax.experts.members import Member, MemberFactory
from skippipe_jax.experts.tasks import Scored, Workspace
from tests.experts.examples import CONFIG, tree_with

NAMES: tuple[str, ...] = ("a", "b", "c", "d", "e", "f", "g")


def config_of(**sections: Any) -> ExpertsConfig:
    return _parse(ExpertsConfig, tree_with(**sections), "")


def named(names: tuple[str, ...], **sections: Any) -> ExpertsConfig:
    domains = [{"name": name, "path": f"text/{name}"} for name in (*names, "letters")]
    return config_of(**{"domains": domains, "lanes": "measured"} | sections)


def of_arm(config: ExpertsConfig, name: str = "equal", hard: Any = None) -> dict[str, Member]:
    arms = {arm.name: arm for arm in MemberFactory(config, hard).arms()}
    return dict(arms[name].members)


@given(
    st.integers(1, 7).flatmap(
        lambda count: st.lists(
            st.floats(0.1, 9, allow_nan=False), min_size=count, max_size=count, unique=True
        )
    )
)
def test_measured_lanes_go_from_the_easiest_to_the_hardest(losses: list[float]):
    names = NAMES[: len(losses)]
    hard = dict(zip(names, losses, strict=True))
    lanes = MemberFactory(named(names), hard).lanes(ArmConfig())
    assert list(lanes) == ["easy", "medium", "hard"][: len(names)]
    in_order = [name for lane in lanes.values() for name in lane]
    assert in_order == sorted(names, key=hard.__getitem__)
    counts = [len(lane) for lane in lanes.values()]
    assert max(counts) - min(counts) <= 1


def test_random_lanes_are_of_the_seed_and_lanes_of_an_arm_its_own():
    found = {
        seed: MemberFactory(named(NAMES, lanes="random", seed=seed)).lanes(ArmConfig())
        for seed in (0, 1)
    }
    assert found[0] == MemberFactory(named(NAMES, lanes="random")).lanes(ArmConfig())
    assert found[0] != found[1]
    for lanes in found.values():
        assert sorted(name for lane in lanes.values() for name in lane) == list(NAMES)
    own = {"one": ("c", "a"), "other": ("b",)}
    assert MemberFactory(named(NAMES)).lanes(ArmConfig(lanes=own)) == own


def test_an_expert_begins_with_the_one_before_it_in_its_lane():
    config = config_of()
    found = of_arm(config)
    seed = MemberFactory(config).seed("S")
    assert found["prose"].parent == found["tables"].parent == seed
    assert found["code"].parent is found["prose"]
    assert [own.kind for own in found["code"].lineage()] == ["seed", "expert", "expert"]
    assert isinstance(seed, Member)
    assert seed.domains == ("prose", "code", "tables")
    assert [one["name"] for one in seed.tree["data"]["mixture"]] == list(seed.domains)
    assert seed.steps == 2
    assert seed.parent is None
    begins = {"prose": "tables", "code": "seed"}
    other = of_arm(config_of(arms={"equal": CONFIG["arms"]["equal"] | {"begins": begins}}))
    assert other["prose"].parent is other["tables"]
    assert other["code"].parent == seed
    given_seed = config_of(seeds={"init_from": {"S": "hf:x"}})
    assert of_arm(given_seed)["prose"].parent == "hf:x"


def test_sections_of_seeds_and_experts_differ_from_those_of_runs():
    run = copy.deepcopy(CONFIG["run"])
    run["model"]["compute_dtype"] = "float32"
    config = config_of(
        run=run | {"optimizer": {"warmup_steps": 3, "beta2": 0.9}},
        seeds={"run": {"optimizer": {"warmup_steps": 1}}},
        experts={"optimizer": {"beta2": 0.8}, "model": {"compute_dtype": "bfloat16"}},
        sizes={"S": {"ffn_width": 40}},
        arms={
            "equal": {"size": "S"},
            "dense": {"kind": "dense", "size": "S", "steps": 7},
            "scratch": {"kind": "scratch", "size": "S", "steps": 8},
        },
    )
    expert = of_arm(config)["prose"]
    seed = expert.lineage()[0]
    [dense], [scratch] = (of_arm(config, name).values() for name in ("dense", "scratch"))
    for own, optimizer, dtype in (
        (seed, {"warmup_steps": 1, "beta2": 0.9}, "float32"),
        (scratch, {"warmup_steps": 1, "beta2": 0.9}, "float32"),
        (expert, {"warmup_steps": 3, "beta2": 0.8}, "bfloat16"),
        (dense, {"warmup_steps": 3, "beta2": 0.8}, "bfloat16"),
    ):
        assert own.tree["optimizer"] == optimizer
        assert own.config().model.compute_dtype == dtype
        assert own.config().model.ffn_width == 40
    assert dense.parent == seed
    assert scratch.parent is None
    assert (dense.steps, scratch.steps) == (7, 8)
    assert dense.domains == scratch.domains == seed.domains


@given(st.integers(1, 7), st.integers(1, 300), st.data())
def test_steps_by_difficulty_add_up_to_as_many(count: int, steps: int, data: st.DataObject):
    """But for half an iteration each, to which they are rounded, and the one that each takes."""
    names = NAMES[:count]
    hard = {name: data.draw(st.floats(0.2, 5)) for name in names}
    config = named(names, arms={"equal": {"size": "S", "steps": steps, "by_difficulty": True}})
    found = of_arm(config, hard=hard)
    mean = sum(hard.values()) / count
    for name, own in found.items():
        assert own.steps >= 1
        assert abs(own.steps - steps * hard[name] / mean) <= max(0.5, 1.0 if own.steps == 1 else 0)
    if min(own.steps for own in found.values()) > 1:
        assert abs(sum(own.steps for own in found.values()) - steps * count) <= count / 2


@given(st.integers(1, 7), st.integers(10, 300), st.data())
def test_a_proposal_has_the_same_compute(count: int, steps: int, data: st.DataObject):
    names = NAMES[:count]
    hard = {name: data.draw(st.floats(0.5, 5)) for name in names}
    config = named(names, sizes={"S": {}, "M": {}, "L": {}})
    written = difficulty.report_text(config, hard, steps)
    proposed = yaml.safe_load(written[written.index("#") :])
    lanes = proposed["lanes"]
    total = sum(proposed["steps"][lane] * len(own) for lane, own in lanes.items())
    assert abs(total - steps * count) <= count
    # What is proposed can be pasted.
    expected = {"easy": "S", "medium": "M", "hard": "L"}
    assert proposed["size"] == {lane: expected[lane] for lane in lanes}
    whole = named(names, sizes={"S": {}, "M": {}, "L": {}}, arms={"equal": proposed})
    assert {name: own.steps for name, own in of_arm(whole).items()} == {
        name: proposed["steps"][lane] for lane, own in lanes.items() for name in own
    }


def test_equal_runs_of_different_arms_are_one():
    sections = {
        "one": {"size": "S", "steps": 4},
        "steps": {"size": "S", "steps": {"easy": 4, "hard": 5}},
        "sizes": {"size": {"easy": "S", "hard": "L"}, "steps": 4},
        "mean": {"kind": "averaged", "of": "one"},
    }
    config = config_of(arms=sections)
    found = {name: of_arm(config, name) for name in sections}
    for domain in ("prose", "code"):
        assert len({own[domain].digest for own in found.values()}) == 1
    assert len({own["tables"].digest for own in found.values()}) == 3
    assert found["mean"] == found["one"]
    assert found["sizes"]["tables"].lineage()[0] != found["one"]["tables"].lineage()[0]


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "model": {"run": CONFIG["run"] | {"model": CONFIG["run"]["model"] | {"layers": 4}}},
    "data": {"run": CONFIG["run"] | {"data": CONFIG["run"]["data"] | {"held_out": 0.3}}},
    "plan": {"run": CONFIG["run"] | {"plan": {"method": "full"}}},
    "size": {"sizes": {"S": {"ffn_width": 26}, "L": {}}},
    "steps of the seed": {"seeds": {"steps": 3}},
    "sections of the seed": {"seeds": {"steps": 2, "run": {"optimizer": {"beta2": 0.5}}}},
    "sections of experts": {"experts": {"optimizer": {"beta2": 0.5}}},
    "a given seed": {"seeds": {"steps": 2, "init_from": {"S": "run:x"}}},
    "text": {"domains": [{**one, "path": one["path"] + "2"} for one in CONFIG["domains"]]},
    "steps": {"arms": {"equal": {"size": "S", "steps": 5}}},
    "another size": {"arms": {"equal": {"size": "L", "steps": 4}}},
    "order": {"lanes": {"easy": ["code", "prose"], "hard": ["tables"]}},
}
SAME: dict[str, dict[str, Any]] = {
    "folder": {"folder": "elsewhere"},
    "at once": {"at_once": 5},
    "arms": {"arms": {"equal": {"size": "S", "steps": 4}, "more": {"size": "L"}}},
    "evaluation": {"evaluation": {"decay": 0.5}},
    "outside": {"domains": [*CONFIG["domains"][:3], {"name": "letters", "path": "other"}]},
    "other sizes": {"sizes": {"S": {}}},
    "probe": {"probe": {"steps": 9}},
}


@pytest.mark.parametrize("name", [*CHANGES, *SAME])
def test_digests_change_with_what_runs_come_from_and_with_nothing_else(name: str):
    known, other = of_arm(config_of()), of_arm(config_of(**(CHANGES | SAME)[name]))
    same = known["code"].digest == other["code"].digest
    assert same == (name in SAME)
    assert (known["code"].name == other["code"].name) == same


def test_scores_are_known_by_all_that_they_come_from():
    config = config_of()
    member = of_arm(config)["prose"]

    def digest(own: ExpertsConfig, *members: Member) -> str:
        return Scored(Workspace(own, Path()), members).digest

    known = digest(config, member)
    assert known == digest(config_of(folder="x", seed=4), member)
    for key, value in (("sequences", 4), ("prior_sequences", 4), ("batch_size", 3)):
        evaluation = CONFIG["evaluation"] | {key: value}
        assert digest(config_of(evaluation=evaluation), member) != known
    # How they are mixed afterwards, models do not know.
    assert digest(config_of(evaluation=CONFIG["evaluation"] | {"decay": 0.5}), member) == known
    assert digest(config, member, of_arm(config)["tables"]) != known
    assert digest(config_of(domains=CHANGES["text"]["domains"]), member) != known


def test_arms_of_the_quick_ensemble_have_the_same_compute():
    for path in ("quick", "study"):
        config = load_experts(Path(f"experiments/experts/{path}.yaml"))
        hard: dict[str, float] = {name: 1 + number / 9 for number, name in enumerate(config.inside)}
        expected = None
        for name, arm in config.arms.items():
            if arm.kind == "experts":
                members = of_arm(config, name, hard).values()
                steps = sum(own.steps for own in members)
                widths = sum(own.steps * own.config().model.ffn_width for own in members)
                expected = expected or (steps, widths)
                assert steps == pytest.approx(expected[0], abs=len(members) / 2)
                assert widths == pytest.approx(expected[1], rel=0.005)
