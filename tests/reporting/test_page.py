"""The page of a run holds the run's figures, needs nothing beside it, and says what is wrong."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import seconds_text, size_text
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.timing.jitter import draw_time_factors
from skippipe_sched.timing.simulate import simulate, simulate_plan
from skippipe_sched.timing.timeline import Averaging, Timeline
from skippipe_sched.timing.traffic import link_traffic

from skippipe_jax.cli.main import main
from skippipe_jax.config import RecipeConfig, parse_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.data.corpus import read_corpus
from skippipe_jax.models.footprint import bytes_per_link
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.reporting import page as page_of_run
from skippipe_jax.reporting.page import load_timelines, report
from skippipe_jax.storage import recording
from skippipe_jax.storage.records import append_record
from skippipe_jax.storage.run_dir import METRICS, RECOVERIES, RunDir

PATHS = ((0, 1, 3), (0, 2, 4), (0, 4, 1), (0, 3, 2))
CASE = {
    "locations": ["Iowa", "Oregon", "Belgium", "Taiwan", "<b>"],
    "nodes": 5,
    "links": [
        [a, b, 20, 0.5]
        for a in ("Iowa", "Oregon", "Belgium", "Taiwan", "<b>")
        for b in ("Iowa", "Oregon", "Belgium", "Taiwan", "<b>")
        if a < b
    ],
    "activation_bytes": 1_500_000,
    "stage_bytes": 40_000_000,
    "forward_s": 0.2,
    "stages": [1, 2, 2],
    "path_length": 3,
    "microbatches_per_data_node": 4,
    "memory": 4,
}


def small_plan(paths=PATHS, **changes: Any) -> Plan:
    case = parse_case(CASE | changes)
    stages = ((0,), (1, 2), (3, 4))
    timeline = simulate(case, stages, paths)
    predicted = Predicted(timeline.iteration_s, timeline.pipeline_s, timeline.averaging_s, 1.0)
    return Plan("balanced", stages, paths, timeline.order, predicted, case)


PLAN = small_plan()


def start_run(folder: Path, plan: Plan = PLAN) -> Path:
    config = {"run_dir": str(folder), "model": {"layers": 3}, "train": {"steps": 500}}
    RunDir(folder).create(parse_config(config), Schedule(RecipeConfig(), {OWN: plan}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return start_run(tmp_path / "run")


def test_a_run_keeps_its_plans_until_others_are_ready(tmp_path: Path):
    folder = start_run(tmp_path)
    config = RunDir(folder).config()
    RunDir(folder).create(config, Schedule(RecipeConfig(), {OWN: PLAN, "full": PLAN}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert folder / "plans" / "full.json" in before
    locked = replace(PLAN, order=tuple(operations[::-1] for operations in PLAN.order))
    with pytest.raises(InputError):
        RunDir(folder).create(config, Schedule(RecipeConfig(), {OWN: PLAN, "x": locked}))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    """The first iteration compiles for a minute; the others take between 4 and 5 s."""
    seconds = 60.0 if step == 1 else 4.0 + step % 2
    return {
        "step": step,
        "loss": 2.0 + 3.0 / step,
        "tokens": 4000,
        "tokens_per_second": 4000 / seconds,
        "seconds_per_iteration": seconds,
        "bytes_sent": 1,
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        "compilations": int(step == 1),
        "peak_in_flight": {"0": 1},
    } | changes


def write_metrics(folder: Path, steps: int, **changes: Any) -> None:
    for step in range(1, steps + 1):
        append_record(folder / METRICS, metrics_line(step, **changes))


def record(folder: Path, step: int) -> Timeline:
    """Two hosts record an iteration."""
    timeline = simulate_plan(PLAN, draw_time_factors(4, 3, 0.5, 0, step))
    for host in range(2):
        nodes = range(0, 3) if host == 0 else range(3, 5)
        runs = tuple(run for run in timeline.runs if run.operation.node in nodes)
        recording.Recording(runs, timeline.averagings).save(folder, step, host)
    return timeline


def run_main(*arguments: Any) -> int:
    return main(["report", *map(str, arguments)])


def parsed(page: str) -> Element:
    """The page as XML, without its namespaces."""
    assert page.startswith("<!DOCTYPE html>\n")
    root = ElementTree.fromstring(page.split("\n", 1)[1])
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def text_of(element: Element) -> str:
    """What a reader sees: no styles and no tooltips."""
    hidden = {"style", "title"}
    parts = [(element.text or "") if element.tag not in hidden else ""]
    for child in element:
        parts += [text_of(child), child.tail or ""]
    return " ".join(" ".join(parts).split())


def figures_of(page: str) -> dict[str, str]:
    return {
        text_of(pair[0]): text_of(pair[1])
        for pair in parsed(page).iter("div")
        if len(pair) == 2 and pair[0].tag == "dt"
    }


def pictures(root: Element, name: str) -> list[Element]:
    return [svg for svg in root.iter("svg") if svg.get("class") == name]


def test_the_page_holds_the_figures_of_the_run(tmp_path):
    folder = start_run(tmp_path / "far apart")
    write_metrics(folder, 101, predicted_seconds=4.0, network="real")
    figures = figures_of(report(folder))
    assert figures["steps"] == "101 of 500"
    assert figures["loss"] == "2.030 nats per token, of the last step"
    assert figures["per iteration"] == "4.50 s median"
    assert figures["tokens per second"] == "900 median"
    assert figures["predicted"] == "4.00 s measured is 1.12 times that"
    assert figures["Model"].startswith("LLaMA, 2.54 million parameters: 3 layers of width 256")
    assert figures["Plan"] == "balanced; 4 microbatches per iteration, each visits 3 of 3 stages"
    assert figures["Nodes"] == "5 in 5 locations; nodes per stage: 1, 2, 2"
    assert figures["Network"] == "real"
    assert f"evaluate --run '{folder}'" in figures["Validation loss"]


def test_what_an_old_run_did_not_note_is_left_out(folder):
    write_metrics(folder, 5)
    page = report(folder)
    figures, text = figures_of(page), text_of(parsed(page))
    assert not {"predicted", "Network"} & set(figures)
    assert "Idle nodes" not in text
    assert "No iteration was recorded" in text
    assert len(pictures(parsed(page), "chart")) == 2


def test_a_run_that_has_just_started_says_so(folder):
    root = parsed(report(folder))
    assert "No iteration is complete yet." in text_of(root)
    assert not pictures(root, "chart")
    assert len(pictures(root, "gantt")) == len(pictures(root, "flows")) == 1


def test_held_out_losses_are_a_curve_of_their_own_and_losses_that_are_none_are_left_out(folder):
    for step in range(1, 7):
        held_out = 4.0 - step / 10 if step % 2 == 0 else None
        loss = None if step == 3 else 5.0
        append_record(folder / METRICS, metrics_line(step, loss=loss, validation_loss=held_out))
    page = report(folder)
    assert figures_of(page)["validation loss"] == "3.400 nats per token; best 3.400, at step 6"
    loss, held_out, _ = map(text_of, pictures(parsed(page), "chart"))
    assert "Loss" in loss
    assert "Validation loss" in held_out
    assert "3.8" in held_out


@pytest.mark.parametrize(
    ("lines", "words"), [(3, "network:"), (2, "network in 2 of 3 iterations:")]
)
def test_an_emulated_network_is_said_at_the_top(folder, lines, words):
    for step in range(1, 4):
        network = "emulate" if step > 3 - lines else "real"
        append_record(folder / METRICS, metrics_line(step, network=network))
    root = parsed(report(folder))
    [notice] = [p for p in root.iter("p") if p.get("class") == "notice"]
    assert text_of(notice).startswith(f"Emulated {words}")


def test_the_newest_recording_stands_below_the_prediction_and_others_are_folded(folder):
    write_metrics(folder, 30)
    record(folder, 10)
    record(folder, 20)
    newest = record(folder, 30)
    root = parsed(report(folder))
    shown, folded = [text_of(svg) for svg in pictures(root, "gantt")]
    assert shown.index("predicted") < shown.index("measured, step 30")
    assert f"end of iteration {newest.iteration_s:.2f} s" in shown
    assert folded.index("measured, step 20") < folded.index("measured, step 10")
    assert "predicted" not in folded
    [details] = [d for d in root.iter("details") if "Other recorded" in text_of(d)]
    assert len(pictures(details, "gantt")) == 1
    assert "Busiest links, in the newest recorded iteration" in text_of(root)


@pytest.mark.parametrize("fewer_hosts", [True, False])
def test_a_recording_in_part_or_of_fewer_hosts_is_noted_and_another_shown(folder, fewer_hosts):
    write_metrics(folder, 20)
    record(folder, 10)
    record(folder, 20)
    if fewer_hosts:
        recording.save_recorded_plan(folder, 20, PLAN)
        why = r"1 recorded iterations used other plans\."
    else:
        recording.recording_path(folder, 20, 1).unlink()
        why = r"Not shown: timelines/00000020 .* of nodes 3, 4 are missing\."
    text = text_of(parsed(report(folder)))
    assert "measured, step 10" in text
    assert "measured, step 20" not in text
    assert re.search(why, text)


def test_of_many_recordings_some_are_shown_the_newest_among_them(folder, monkeypatch):
    write_metrics(folder, 1)
    for step in range(1, 21):
        record(folder, step)
    operations = sum(map(len, PLAN.order))
    monkeypatch.setattr(page_of_run, "MOST_OPERATIONS", 3 * operations)
    timelines, notes = load_timelines(folder, PLAN, recording.recorded_steps(folder))
    assert list(timelines) == [1, 11, 20]
    assert notes == ["3 of 20 recorded iterations are shown."]
    monkeypatch.setattr(page_of_run, "MOST_OPERATIONS", operations - 1)
    assert list(load_timelines(folder, PLAN, recording.recorded_steps(folder))[0]) == [20]


def test_links_are_listed_with_what_went_over_them(folder):
    write_metrics(folder, 3)
    root = parsed(report(folder))
    [table] = [t for t in root.iter("table") if t.get("class") is None]
    heading, *rows = [[text_of(cell) for cell in row] for row in table]
    assert heading == ["link", "carries", "planned", "sent", "busy", "of iteration"]
    by_link = {row[0]: row for row in rows}
    timeline = simulate_plan(PLAN)
    flow = next(f for f in link_traffic(PLAN, timeline) if (f.source, f.target) == (1, 2))
    sent = bytes_per_link(RunDir(folder).config(), PLAN, 3)
    assert by_link["node 1 (Oregon) → node 2 (Belgium)"][1:] == [
        "averaging",
        "40.0 MB",
        size_text(sent[1, 2]),
        f"{flow.busy_s:.3f} s",
        f"{flow.busy_s / timeline.iteration_s:.0%}",
    ]
    assert by_link["node 0 (Iowa) → node 1 (Oregon)"][3] == size_text(sent[0, 1])


@pytest.mark.parametrize("locations", [["Iowa", "Oregon"], ["Iowa"]])
def test_links_within_a_location_are_left_out_beside_others(tmp_path, locations):
    links = [["Iowa", "Oregon", 20, 0.5]][: len(locations) - 1]
    plan = small_plan(locations=locations, links=links)
    root = parsed(report(start_run(tmp_path / "run", plan)))
    [table] = [t for t in root.iter("table") if t.get("class") is None]
    within = [
        flow
        for flow in link_traffic(plan, simulate_plan(plan))
        if (flow.source - flow.target) % len(locations) == 0
    ]
    rows = [text_of(row) for row in table][1:]
    assert rows
    if len(locations) == 2:
        assert all("Iowa" in row and "Oregon" in row for row in rows)
        assert f"{len(within)} links within a location are not shown" in text_of(root)
    else:
        assert "not shown" not in text_of(root)


def test_a_ring_that_was_quicker_than_planned_is_busy_no_longer_than_it_took(folder, monkeypatch):
    monkeypatch.setattr(page_of_run, "BUSIEST_LINKS", 100)
    write_metrics(folder, 10)
    runs = simulate_plan(PLAN).runs
    averagings = tuple(Averaging(stage, 30.0, 30.001) for stage in range(3))
    recording.Recording(runs, averagings).save(folder, 10, 0)
    root = parsed(report(folder))
    [table] = [t for t in root.iter("table") if t.get("class") is None]
    rows = [[text_of(cell) for cell in row] for row in table][1:]
    assert {row[4] for row in rows if row[1] == "averaging"} == {"0.00100 s"}
    busy_s = [float(row[4].removesuffix(" s")) for row in rows]
    assert busy_s == sorted(busy_s, reverse=True)


def test_idle_nodes_are_bars_by_stage(folder):
    before_a_move = metrics_line(1, idle_share=[0.9] * 7)
    append_record(folder / METRICS, before_a_move)
    for step, share in ((2, None), (3, 0.1), (4, 0.3), (5, 0.7)):
        shares = None if share is None else [share, 0.5, 0.5, 0.5, 1.0]
        append_record(folder / METRICS, metrics_line(step, idle_share=shares))
    root = parsed(report(folder))
    assert "Share of an iteration, median of the last 3 iterations" in text_of(root)
    tables = [t for t in root.iter("table") if t.get("class") == "idle"]
    assert [text_of(table[0]) for table in tables] == ["Stage 0 · data", "Stage 1", "Stage 2"]
    rows = [row for table in tables for row in table.iter("tr")]
    assert [text_of(row[0]).split(" · ")[0] for row in rows] == [f"node {n}" for n in range(5)]
    assert [text_of(row[2]) for row in rows] == ["30%", "50%", "50%", "50%", "100%"]
    predicted = simulate_plan(PLAN)
    for node, row in enumerate(rows):
        bar, mark = row[1]
        assert bar.get("style") == f"width:{[30, 50, 50, 50, 100][node]:.1f}%"
        idle = 100 * (1 - predicted.busy_s[node] / predicted.iteration_s)
        assert mark.get("style") == f"left:{idle:.1f}%"


def test_idle_shares_come_from_a_recording_where_none_was_noted(folder):
    write_metrics(folder, 10)
    timeline = record(folder, 10)
    root = parsed(report(folder))
    shares = [text_of(row[2]) for row in root.iter("tr") if row[-1].get("class") == "number"]
    idle = 1 - np.array(timeline.busy_s) / timeline.iteration_s
    assert shares[-5:] == [f"{share:.0%}" for share in idle]


def test_hosts_that_were_lost_stand_with_the_cause(folder):
    for step in range(1, 11):
        line = metrics_line(step, generation=1 + (step > 8), compilations=int(step in (1, 9)))
        append_record(folder / METRICS, line)

    def go_on(generation: Generation) -> None:
        members = [{"host": host, "address": "a:1"} for host in generation.members]
        RunDir(folder).append_generation(generation, PLAN, members)

    go_on(Generation(1, (0, 1, 2), (7, 7, 7), 0, 0))
    assert "Hosts" not in [text_of(title) for title in parsed(report(folder)).iter("h2")]
    go_on(Generation(2, (1, 2), (7, 7), 1, 8, is_rewound=True, cause="host 0 was lost"))
    rows = [[text_of(cell) for cell in row] for row in parsed(report(folder)).iter("tr")]
    told = [[*row[:2], *row[3:]] for row in rows if len(row) == 11]
    planned_s = PLAN.predicted.iteration_s
    # Of those that compiled nothing: steps 2 to 8, and 10.
    ran = [
        [PLAN.method, seconds_text(planned_s), seconds_text(s), f"{s / planned_s - 1:+.0%}"]
        for s in (4.0, 4.0)
    ]
    rewound = "host 0 was lost; all hosts rolled back to the checkpoint"
    assert told[1:] == [
        ["1", "0", "start of the run", "3", "0, 1, 2", "0", *ran[0]],
        ["2", "8", rewound, "2", "1, 2", "1", *ran[1]],
    ]
    line = {"generation": 2, "cause": "lost", "stages": [1, 2]}
    line |= {"asked": "buddy", "by": "rewind"}
    line |= {"step": 8, "steps_old": 3, "loss_before": 2.5, "loss_after": None}
    append_record(folder / RECOVERIES, line)
    rows = [[text_of(cell) for cell in row] for row in parsed(report(folder)).iter("tr")]
    by = "rewind, because buddy was not possible"
    assert ["2", "1, 2", by, "3", "2.5000", "unknown"] in rows
    go_on(Generation(3, (1, 2), (7, 7), 1, 9, cause="host 0 was lost", left_out=(1, 2)))
    rows = [[text_of(cell) for cell in row] for row in parsed(report(folder)).iter("tr")]
    assert "host 0 was lost; without stage 1, 2" in [row[3] for row in rows if len(row) == 11]


def test_names_are_escaped_and_nothing_is_loaded_from_elsewhere(tmp_path):
    folder = start_run(tmp_path / "<i>&amp;")
    write_metrics(folder, 5, idle_share=[0.5] * 5)
    record(folder, 5)
    page = report(folder)
    assert "<b>" not in re.sub("<dd><b>", "", page)
    root = parsed(page)
    assert root.findtext("head/title") == "<i>&amp;"
    assert "node 4 · <b>" in text_of(root)
    assert "node 4 (<b>)" in text_of(root)
    assert not [e for e in root.iter() if e.tag in ("script", "img", "link", "iframe")]
    assert not [e for e in root.iter() if {"src", "href"} & set(e.keys())]
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#gantt-wait"}
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    [configuration] = root.iter("pre")
    assert configuration.text == (folder / "config.yaml").read_text()


def test_a_long_run_stays_small(folder):
    line = json.dumps(metrics_line(2, predicted_seconds=4.0, idle_share=[0.5] * 5)) + "\n"
    (folder / "metrics.jsonl").write_text(line * 5_000)
    assert len(report(folder)) < 200_000


def test_the_command_writes_where_it_is_told_or_says_why_it_cannot(tmp_path, folder, capsys):
    write_metrics(folder, 2)
    assert run_main(folder) == 0
    assert capsys.readouterr().out == f"report written to {folder / 'report.html'}\n"
    assert run_main(folder, "-o", tmp_path / "page.html") == 0
    page = folder / "report.html"
    assert (tmp_path / "page.html").read_text() == page.read_text()
    page.unlink()

    def refused(*arguments: Any) -> str:
        assert run_main(*arguments) == 2
        assert not page.exists()
        return capsys.readouterr().err

    assert "--output = " in refused(folder, "-o", folder / "config.yaml" / "page.html")
    assert "does not contain a run" in refused(tmp_path)
    record(folder, 10)
    recording.recording_path(folder, 10, 1).write_text('{"runs": [["F", 0')
    assert "timelines/00000010/host_1.json" in refused(folder)
    (folder / "metrics.jsonl").unlink()
    assert refused(folder).startswith("error: metrics.jsonl = ")


def test_the_page_tells_of_conversations_and_of_what_is_learnt_of_them(tmp_path: Path):
    chats, folder = tmp_path / "chats.jsonl", tmp_path / "run"
    answer = {"role": "assistant", "content": "So."}
    asked = [{"role": "user", "content": f"Why {number}?"} for number in range(10, 50)]
    lines = [json.dumps({"messages": [question, answer]}) for question in asked]
    chats.write_text("\n".join(lines) + "\n")
    config = {
        "run_dir": str(folder),
        "model": {"layers": 3},
        "data": {"source": "chat", "path": str(chats), "packing": "documents", "held_out": 0.5},
    }
    RunDir(folder).create(parse_config(config), Schedule(RecipeConfig(), {OWN: PLAN}))
    # Between the marks of a document; what is learnt is the answer and its end.
    size = 1 + len("<|user|>\nWhy 10?\n<|assistant|>\n") + len("So.") + 1
    found = re.search(r"<dt>Conversations</dt><dd>(.*?)</dd>", report(folder))
    assert found is not None
    counts = re.match(r"(\d+) for training, (\d+) tokens; trained on the (\d+) \(", found[1])
    assert counts is not None
    count, tokens, learnt = map(int, counts.groups())
    assert (tokens, learnt) == (count * size, count * 4)
    assert found[1].endswith("tokens of the assistant; chat template: none")
    chats.unlink()
    read_corpus.cache_clear()
    assert "<dt>Conversations</dt><dd>text not found</dd>" in report(folder)
    assert "<dt>Conversations</dt>" not in report(start_run(tmp_path / "text"))


# The page of a run in a browser: nothing is cut off in narrow and in wide windows.


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# Writes into the page what stands past its right edge, how wide the page is and could be shown, and
# the same of the table of hosts, which scrolls where it must.
MEASURE = """<script>
const cut = [...document.body.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,svg,figure,pre,summary")]
  .filter(e => !e.closest(".wide") && e.getClientRects().length
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
document.body.innerHTML = JSON.stringify({
  page: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
  cut: cut.map(e => e.tagName + ": " + e.textContent.trim().slice(0, 60)),
  hosts: [...document.querySelectorAll(".wide:has(> .wraps)")].map(
    e => [e.scrollWidth, e.clientWidth]),
});
document.body.setAttribute("data-measured", "yes");
</script></body>"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1024, 1600])
def test_nothing_is_cut_off(tmp_path: Path, width: int):
    folder = start_run(tmp_path / "run")
    write_metrics(folder, 10, validation_loss=2.5, idle_share=[0.5] * 5)
    record(folder, 10)
    for number in range(1, 5):
        members = [{"host": host, "address": "a:1"} for host in range(8)]
        told = Generation(
            number, tuple(range(8)), (7,) * 8, 0, 5, is_rewound=number > 1, cause="host 3 was lost"
        )
        RunDir(folder).append_generation(told, PLAN, members)
    page = tmp_path / "page.html"
    page.write_text(report(folder).replace("</body>", MEASURE))
    assert CHROMIUM is not None
    shown = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
            *(f"--window-size={width},1200", f"--user-data-dir={tmp_path / 'browser'}"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    [measured] = re.findall(r'<body data-measured="yes">(.*)</body>', shown, re.DOTALL)
    found = json.loads(measured)
    assert found["page"][0] <= found["page"][1]
    assert not found["cut"]
    [(needed, there)] = found["hosts"]
    assert needed <= there or width < 1000
