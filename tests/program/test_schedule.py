"""Training by several plans equals the oracle, compiles nothing anew, and goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.problem.rules import violations
from skippipe_sched.search.budget import Search

from skippipe_jax import Run
from skippipe_jax.config import (
    AveragingConfig,
    Phase,
    RecipeConfig,
    load_config,
    parse_config,
)
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.program.schedule import OWN, Schedule, make_schedule, stage_shares
from skippipe_jax.reporting.page import report
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.planning import log_planned_time, make_plans
from skippipe_jax.training.setup import plan_change
from skippipe_jax.training.trainer import Trainer
from tests.harness import oracle
from tests.harness.processes import started_processes
from tests.harness.training_runs import (
    by_name,
    virtual_devices,
    write_config,
)
from tests.multihost.test_training_hosts import WRITES_REPLICAS, read_replicas
from tests.sched.examples import plan_of

PATIENCE_S = 120.0
# One JAX for all hosts, in the place of the cluster that tests have in common.
DISTRIBUTED = {"runtime": "distributed", "heartbeat_timeout_s": 20, "connect_timeout_s": 120}
TOLERANCE = 2e-5
STEPS = 8
CASE = {
    "nodes": 7,
    "locations": ["here"],
    "links": [],
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.005,
    "stages": [2, 2, 1, 2],
    "path_length": 3,
    "microbatches_per_data_node": 3,
    "memory": 2,
}
RECIPE = {
    "full_every": 4,
    "phases": [
        {"from_share": 0.02, "path_length": 2},
        {"from_share": 0.05, "max_swaps": 1, "skipping": 0.7},
    ],
    "redraw_every": 1,
    "redraws": 2,
}
PLANS_TAKEN = [
    "plan_draw_000",
    "plan_draw_001",
    "from_2_draw_000",
    "full",
    "from_2_draw_000",
    "from_5_draw_001",
    "full",
    "full",
]
PATH_LENGTHS = [3, 3, 2, 4, 2, 3, 4, 4]


def config_in(folder: Path, **sections: Any) -> Path:
    given: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "plan": {"case": CASE, "method": "balanced", "seed": 2},
        "recipe": RECIPE,
        "train": {"steps": STEPS},
        "checkpoint": {"every": 100},
        # Large steps, and an epsilon so large that updates depend on how large a gradient is.
        "optimizer": {
            "learning_rate": 3e-2,
            "warmup_steps": 1,
            "decay_steps": 100,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "epsilon": 1e-2,
        },
    }
    return write_config(folder, **given | sections)


def train_here(config: Path, *overrides: str, resume: bool = False) -> Trainer:
    """Train in this process, the nodes spread over its devices."""
    trainer = Trainer(load_config(config, overrides), resume=resume, config_folder=config.parent)
    assert trainer.run().stopped_by is None
    return trainer


def assert_plans_were_taken(run_dir: Path) -> None:
    """The metrics tell of the plans, which are saved, drawn, and as the recipe says."""
    schedule, lines = RunDir(run_dir).schedule(), Run(run_dir).metrics
    assert [line["plan"] for line in lines] == PLANS_TAKEN
    plans = [schedule.plans[name] for name in PLANS_TAKEN]
    assert [{len(path) for path in plan.microbatches} for plan in plans] == [
        {length} for length in PATH_LENGTHS
    ]
    first, again = (schedule.plans[name].microbatches for name in PLANS_TAKEN[:2])
    assert first != again
    assert len({plan.stages for plan in schedule.plans.values()}) == 1
    for line, plan in zip(lines, plans, strict=True):
        assert line["predicted_seconds"] == plan.predicted.iteration_s
        assert violations(plan.case, plan.stages, plan.microbatches) == []
    assert lines[3]["bytes_sent"] > lines[4]["bytes_sent"], "the one visits all stages"
    names = {path.stem for path in (run_dir / "plans").iterdir()}
    assert names == {*PLANS_TAKEN, "from_5_draw_000"}
    for name in names:
        assert (run_dir / "plans" / f"{name}.svg").read_text().startswith("<svg")


def expected_run(run_dir: Path) -> tuple[list[Any], list[float]]:
    """What the oracle makes of a finished run: parameters of each stage, and the losses."""
    config = RunDir(run_dir).config()
    schedule, batches = RunDir(run_dir).schedule(), TrainingBatches(config.data)
    plans = [schedule.plans[name] for name in PLANS_TAKEN]
    sent = len(plans[0].microbatches)
    phases = [
        oracle.Phase(
            config.model.stage_partition(len(plan.stages)),
            [[plan.stage_of[node] for node in path] for path in plan.microbatches],
            [[batches[step * sent + m] for m in range(sent)]],
        )
        for step, plan in enumerate(plans)
    ]
    return oracle.train_by(config.model, config.optimizer, phases, config.seed, STEPS)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"execution": "ready-first", "network": {"averaging": "ring"}},
            id="ring",
        ),
        pytest.param(
            {"network": {"averaging": "ring", "mode": "emulate"}, "trace": "every 3"},
            id="emulated",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_training_by_several_plans_equals_the_oracle(tmp_path: Path, sections: dict[str, Any]):
    shape = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
    model = shape | {"recompute": "stage"}
    run_dir = tmp_path / "run"
    trainer = train_here(config_in(tmp_path, **sections | {"model": model}))

    assert_plans_were_taken(run_dir)
    expected, losses = expected_run(run_dir)
    for node, state in trainer.runtime.states.items():
        stage = trainer.runtime.topology.stage_of[node]
        error = oracle.relative_error(state.parameters, expected[stage])
        assert error < TOLERANCE, f"node {node}: {error}"
    lines = Run(run_dir).metrics
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=0, atol=1e-5)
    assert [line["compilations"] for line in lines[1:]] == [0] * (STEPS - 1)
    if "trace" in sections:
        assert_recordings_are_of_their_plans(run_dir)


def assert_recordings_are_of_their_plans(run_dir: Path) -> None:
    """Steps 3 and 6 are recorded, of paths of two and of three stages."""
    counts = []
    for step in (3, 6):
        assert (run_dir / "timelines" / f"{step:08d}.svg").exists()
        recording = (run_dir / "timelines" / f"{step:08d}" / "host_0.json").read_text()
        counts.append(len(json.loads(recording)["runs"]))
    assert counts == [6 * (2 * length + 1) for length in (2, 3)]
    assert "2 recorded iterations used other plans." in report(run_dir)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hosts", "sections"),
    [
        (3, {"execution": "ready-first", "network": {"averaging": "ring"}}),
        (2, {"network": {"averaging": "collective"}, "cluster": DISTRIBUTED}),
    ],
    ids=["3 hosts, ring", "2 hosts, collective"],
)
def test_hosts_take_the_plans_together(tmp_path: Path, hosts: int, sections: dict[str, Any]):
    config = config_in(tmp_path, **sections)
    with started_processes(tmp_path / "hosts") as processes:
        command = (*WRITES_REPLICAS, "--config", config)
        processes.start_hosts(hosts, *command, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * hosts, processes.outputs()
    assert_plans_were_taken(tmp_path / "run")
    lines = Run(tmp_path / "run").metrics
    assert [line["compilations"] for line in lines[1:]] == [0] * (STEPS - 1)
    expected, _ = expected_run(tmp_path / "run")
    for stage, replicas in enumerate(read_replicas(tmp_path)):
        truth = by_name({"parameters": expected[stage]})
        for replica in replicas:
            error = oracle.relative_error({name: replica[name] for name in truth}, truth)
            assert error < TOLERANCE, f"stage {stage}: {error}"


def test_a_run_may_go_on_by_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_in(tmp_path)
    train_here(config, "train.steps=2")
    train_here(config, "train.steps=4", "recipe.phases=null", "recipe.full_every=1", resume=True)
    assert "plan changed after step " in capsys.readouterr().out
    plans = [line["plan"] for line in Run(tmp_path / "run").metrics]
    assert plans == [*PLANS_TAKEN[:2], "full", "full"]


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["recipe.phases=[{path_length: 5}]"], "recipe.phases[0]", "there are only 4 stages"),
        (
            [
                "recipe.phases=[{}, {from_step: 3, path_length: 2}]",
                "plan.case.path_length=4",
                "plan.case.rules.max_jump=0",
            ],
            "recipe.phases[1]",
            "max_jump",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: list[str], field: str, problem: str
):
    with pytest.raises(InputError) as caught:
        train_here(config_in(tmp_path), *overrides)
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ({"skip_scaling": "inverse"}, "recipe.skip_scaling"),
        ({"full_every": 0}, "recipe.full_every"),
        ({"redraws": 0}, "recipe.redraws"),
        ({"redraws": 3}, "recipe.redraws"),
        ({"longest_redraw": 0.9}, "recipe.longest_redraw"),
        ({"redraw_every": 3}, "recipe.redraw_every"),
        ({"phases": [{"from_step": -1}]}, "recipe.phases[0].from_step"),
        ({"phases": [{"path_length": 0}]}, "recipe.phases[0].path_length"),
        ({"phases": [{}, {"from_step": 2, "max_swaps": -1}]}, "recipe.phases[1].max_swaps"),
        ({"phases": [{"from_step": 2}, {"from_step": 2}]}, "recipe.phases[1].from_step"),
        ({"phases": [{"length": 2}]}, "recipe.phases[0].length"),
        ({"phases": [{"skipping": 1.5}]}, "recipe.phases[0].skipping"),
        ({"phases": [{"path_share": 1.5}]}, "recipe.phases[0].path_share"),
        ({"phases": [{"path_share": 0}]}, "recipe.phases[0].path_share"),
        ({"phases": [{"path_share": 0.5, "path_length": 2}]}, "recipe.phases[0].path_length"),
        ({"phases": [{"path_share": 0.5, "skipping": 0}]}, "recipe.phases[0].path_share"),
        ({"phases": [{"skipping": 0, "path_length": 2}]}, "recipe.phases[0].path_length"),
        ({"phases": [{"from_share": 1.0}]}, "recipe.phases[0].from_share"),
        ({"phases": [{"from_share": 0.5, "from_step": 2}]}, "recipe.phases[0].from_step"),
        ({"phases": [{"from_step": 2}, {"from_share": 0.5}]}, "recipe.phases[1]"),
        ({"phases": [{"from_share": 0.5}, {"from_share": 0.4}]}, "recipe.phases[1].from_share"),
        ({"preset": "quality", "phases": []}, "recipe.phases"),
        ({"preset": "good"}, "recipe.preset"),
    ],
)
def test_recipes_without_sense_are_refused(recipe: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        parse_config({"recipe": recipe})
    assert caught.value.field == field


def names(recipe: RecipeConfig, plans: list[str], iterations: int) -> list[str]:
    [plan] = drawn(1)
    schedule = Schedule(recipe, dict.fromkeys([OWN, *plans], plan))
    return [schedule.name(iteration) for iteration in range(iterations)]


def drawn(count: int) -> list[Plan]:
    case = parse_case(CASE)
    return [make_plan(case, "balanced", Search(seed)) for seed in range(count)]


def test_phases_begin_after_their_number_of_iterations():
    phases = (Phase(1), Phase(3))
    found = names(RecipeConfig(phases=phases, full_every=5), ["from_1", "from_3", "full"], 6)
    assert found == ["plan", "from_1", "from_1", "from_3", "full", "from_3"]


@given(share=st.floats(0, 1), begins=st.integers(0, 50), count=st.integers(1, 200))
def test_full_iterations_are_spread_evenly_over_a_phase(share: float, begins: int, count: int):
    phase = Phase(begins, skipping=share)
    skipped = np.cumsum([phase.skips(begins + number) for number in range(count)])
    assert np.all(np.abs(skipped - share * np.arange(1, count + 1)) <= 1)


def test_presets_count_their_phases_by_the_schedule_of_the_learning_rate():
    quality, robust = (RecipeConfig(preset=name) for name in ("quality", "robust"))
    assert names(quality.in_steps(5), ["full"], 5) == ["plan", "plan", "full", "full", "full"]
    taken = names(robust.in_steps(10), ["full", "from_4"], 9)
    assert taken == ["plan"] * 4 + ["full", "from_4", "full", "from_4", "full"]
    config = parse_config({"recipe": {"preset": "quality"}, "train": {"steps": 50}})
    assert config.recipe_in_steps.phases == (Phase(20, skipping=0.0),)
    config = parse_config({}, ["recipe.preset=quality", "optimizer.decay_steps=80"])
    assert config.recipe_in_steps.phases == (Phase(32, skipping=0.0),)


def test_the_whole_run_takes_as_long_as_its_iterations_together():
    [own] = drawn(1)
    schedule = schedule_of(RecipeConfig(preset="robust").in_steps(20), own)
    assert schedule.plans.keys() == {"plan", "full", "from_8"}
    assert {len(path) for path in schedule.plans["from_8"].microbatches} == {2}, "half of four"
    each_s = {name: plan.predicted.iteration_s for name, plan in schedule.plans.items()}
    assert each_s["full"] > each_s["plan"] > each_s["from_8"]
    total_s = schedule.total_s(16, AveragingConfig())
    assert total_s == pytest.approx(8 * each_s["plan"] + 4 * each_s["full"] + 4 * each_s["from_8"])


def test_a_share_of_the_stages_is_rounded_up_and_changes_nothing_where_it_is_what_the_case_has():
    assert [Phase(path_share=0.5).stages_visited(stages) for stages in (4, 5, 6)] == [2, 3, 3]
    [own] = drawn(1)
    recipe = RecipeConfig(phases=(Phase(8, path_share=0.75),))
    assert schedule_of(recipe, own).plans["from_8"] is own


@pytest.mark.parametrize(
    ("overrides", "suggests"),
    [
        ([], True),
        (["recipe.preset=quality"], False),
        (["recipe.phases=[{from_step: 50, path_length: 4, max_swaps: 0}]"], False),
        (["recipe.phases=[{from_step: 50, path_length: 2}]"], True),
        (["plan.case.path_length=4"], False),
    ],
)
def test_a_run_that_skips_to_the_end_is_told_of_the_preset(
    overrides: list[str], suggests: bool, capsys: pytest.CaptureFixture[str]
):
    given = {"plan": {"case": dict(CASE), "method": "balanced", "budget_s": 0.1}}
    config = parse_config(given, overrides)
    log_planned_time(config, make_plans(config, Path(), None))
    said = "".join(capsys.readouterr())
    assert "by the timing model" not in said, "nobody has measured what the case says"
    assert ("recipe.preset = quality" in said) == suggests


def test_the_time_of_the_iterations_that_are_left_is_told(capsys: pytest.CaptureFixture[str]):
    nodes = [{"location": "here", "forward_s": 1.0, "memory": 4}]
    case = {"nodes": nodes, "locations": ["here"], "links": [], "stages": [1], "path_length": 1}
    case |= {"microbatches_per_data_node": 2, "backward_ratio": 2.0}
    config = parse_config({"plan": {"case": case, "method": "balanced"}, "train": {"steps": 60}})
    schedule = make_plans(config, Path(), None)
    for done in (0, 52, 60):
        log_planned_time(config, schedule, done)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "# by the timing model, all 60 iterations take 6.5min"
    assert second == "# by the timing model, the last 8 of 60 iterations take 52s"


def test_what_another_plan_changes_is_said():
    given = {"plan": {"case": dict(CASE), "method": "balanced", "budget_s": 0.1}}
    before = make_plans(parse_config(given), Path(), None).plans[OWN]
    predicted = replace(before.predicted, iteration_s=0.125)
    after = replace(before, predicted=predicted)
    assert plan_change(before, before, 52) == ""
    assert plan_change(after, before, 52) == (
        "plan changed after step 52: predicted iteration 0.125 s -> "
        f"{before.predicted.iteration_s:.3g} s"
    )


def test_redrawn_plans_take_turns():
    recipe = RecipeConfig(redraw_every=2, redraws=3, phases=(Phase(4),))
    plans = ["plan_draw_000", "plan_draw_001", "from_4_draw_000"]
    found = [name[-8:] for name in names(recipe, plans, 7)]
    assert found == ["draw_000", "draw_000", "draw_001", "draw_001", *["draw_000"] * 3]


def schedule_of(recipe: RecipeConfig, own: Plan, say: Callable[[str], None] = print) -> Schedule:
    return make_schedule(recipe, own, "balanced", 0, 0.1, say)


def test_a_phase_with_the_paths_of_the_plan_takes_the_plan():
    [own] = drawn(1)
    recipe = RecipeConfig(phases=(Phase(0, 2), Phase(9, path_length=3, max_swaps=0)))
    schedule = schedule_of(recipe, own)
    assert schedule.plans.keys() == {"plan", "from_0", "from_9"}
    assert schedule.plan(8) is not own
    assert schedule.plan(9) is own


def test_a_method_for_full_paths_has_no_plan_for_a_phase_with_shorter_ones():
    [own] = drawn(1)
    with pytest.raises(InputError) as caught:
        make_schedule(RecipeConfig(phases=(Phase(3, 2),)), own, "full", 0, 0.1, print)
    assert caught.value.field == "recipe.phases[0]"
    assert "makes only paths of 4 stages" in caught.value.problem


def test_redrawn_plans_that_take_longer_are_left_out():
    far = CASE | {"locations": ["Belgium", "Iowa", "Taiwan"], "links": "gcp12", "hop_overhead_s": 0}
    own = make_plan(parse_case(far), "balanced", Search(0))
    told: list[str] = []
    schedule = schedule_of(RecipeConfig(redraw_every=1, redraws=9), own, told.append)
    kept = [plan.microbatches for name, plan in schedule.plans.items() if name != OWN]
    sought = [
        make_plan(own.case, "balanced", Search(seed, placement=own.stages)) for seed in range(1, 9)
    ]
    seconds = {plan.microbatches: plan.predicted.iteration_s for plan in (own, *sought)}
    longest_s = 1.03 * min(seconds.values())
    assert kept == [paths for paths, taken_s in seconds.items() if taken_s <= longest_s]
    assert 0 < len(kept) < len(seconds)
    assert told[-1].startswith(f"plan: using {len(kept)} of 9 redrawn plans; ")
    for longest in (2 * max(seconds.values()) / min(seconds.values()), None):
        recipe = RecipeConfig(redraw_every=1, redraws=9, longest_redraw=longest)
        plans = schedule_of(recipe, own, told.append).plans
        assert len(plans.keys() - {OWN}) == len(seconds)


def test_shares_of_stages():
    plan = plan_of([[0], [1, 2], [3]], [[0, 1], [0, 2, 3], [0, 2], [0]])
    assert stage_shares(plan).tolist() == [1, 0.75, 0.25]
