"""The bridge to lm-evaluation-harness: its three kinds of request, and tasks from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from skippipe_sched.errors import InputError

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.tokenizer import ByteTokenizer
from skippipe_jax.inference.decoding import generate_tokens
from skippipe_jax.inference.ensemble import Ensemble
from skippipe_jax.inference.harness_model import DEFAULT_NEW_TOKENS, HarnessModel
from skippipe_jax.inference.model_source import load_model
from skippipe_jax.inference.partial import StageOrder
from skippipe_jax.inference.staged_model import StagedModel
from tests.harness.partial_models import logits_of, save_run
from tests.inference.conftest import Command, language_model

SHAPES = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_width": 24, "context": 32}
SECTIONS: dict[str, Any] = {"model": SHAPES, "data": {"sequence_length": 32}}
STAGES = 3
QUESTIONS = [
    {"question": "2 + 2 =", "choices": ["4", "22", "a lot"], "answer": 0},
    {"question": "", "choices": ["yes", "no", "?"], "answer": 1},
    {"question": "Words with a space at the end, more than fit ", "choices": ["b", "cd", "e"],
     "answer": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "run"
    save_run(folder, SECTIONS, STAGES)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks that read one local file."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "questions.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    kinds = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        "read": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, own in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(shared | own | {"task": name}))
    return folder


def request(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def score_by_hand(
    model: StagedModel, order: StageOrder, given: list[int], asked: list[int]
) -> tuple[float, bool]:
    """Log-likelihood of `asked`, and whether it is the likeliest, without batches or padding."""
    tokens = np.array([(given + asked)[-33:]], np.int32)
    logits = logits_of(model, order, tokens[:, :-1])[0, -len(asked) :]
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    nats = np.log(chances[np.arange(len(asked)), asked]).sum()
    return float(nats), logits.argmax(axis=-1).tolist() == asked


ALL = (0, 1, 2)


def harness(run: Path, *, stages: str | None = None, batch_size: int = 8) -> HarnessModel:
    order = [] if stages is None else ["--stage-order", stages]
    return HarnessModel(language_model("--run", run, *order), batch_size)


def encoded(text: str) -> list[int]:
    return ByteTokenizer().encode(text).tolist()


@pytest.mark.parametrize("stages", [None, "0,2", "0,2,1"])
def test_likelihoods_equal_those_computed_one_by_one(stages: str | None, run: Path):
    model = harness(run, stages=stages, batch_size=2)
    order = (0, 1, 2) if stages is None else tuple(map(int, stages.split(",")))
    pairs = [("one", " two"), ("", "start"), ("space ", "word"), ("x" * 60, "yz"), ("a", "b" * 9)]
    found = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    # A space at the end of the context belongs to the continuation.
    pairs[2] = ("space", " word")
    for (context, continuation), (nats, greedy) in zip(pairs, found, strict=True):
        given = [256, *encoded(context)]
        expected = score_by_hand(load_model(run), order, given, encoded(continuation))
        assert abs(nats - expected[0]) < 1e-3
        assert greedy == expected[1]
    assert len({round(nats, 3) for nats, _ in found}) == len(pairs)


def test_long_texts_are_read_in_windows(run: Path):
    """Every token once, the first after the begin mark, the last window with all of the context."""
    model = harness(run, batch_size=3)
    text = "".join(map(chr, range(40, 117)))
    tokens = encoded(text)
    parts = [([256], tokens[:32]), (tokens[31:32], tokens[32:64]), (tokens[44:64], tokens[64:])]
    staged = load_model(run)
    expected = [score_by_hand(staged, ALL, *part)[0] for part in parts]
    short = score_by_hand(staged, ALL, [256], encoded("short"))[0]
    requests = [request("loglikelihood_rolling", text), request("loglikelihood_rolling", "short")]
    assert model.loglikelihood_rolling(requests) == pytest.approx([sum(expected), short], abs=1e-3)


def test_texts_are_generated_up_to_a_stop(run: Path):
    model = harness(run)
    how = {"until": [], "max_gen_toks": 12}
    [whole] = model.generate_until([request("generate_until", "begin" * 20, how)])
    prompt = [256, *encoded("begin" * 20)][-20:]
    tokens = generate_tokens(load_model(run), prompt, 12, Sampling(temperature=0.0), end=257)
    assert whole == ByteTokenizer().decode(list(tokens))
    stop = whole[3:5]
    stopped = request("generate_until", "begin" * 20, how | {"until": [stop, "never"]})
    assert model.generate_until([stopped]) == [whole[: whole.index(stop)]]


WORDS = st.text("abc é\n", max_size=40)
SETTINGS = st.fixed_dictionaries(
    {"until": st.sampled_from([[], "\n", ["a", "bc"]]), "max_gen_toks": st.integers(1, 8)},
    optional={"temperature": st.just(0.7), "top_p": st.just(0.9)},
)


CONTINUATIONS = WORDS.filter(lambda text: len(text.encode()) <= 32)


def none_or_at_least_four(each: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """As many as are answered together, so that batches have few sizes."""
    return st.just([]) | st.lists(each, min_size=4, max_size=9)


@settings(max_examples=6)
@given(
    none_or_at_least_four(st.tuples(WORDS, CONTINUATIONS)),
    none_or_at_least_four(st.tuples(WORDS, SETTINGS)),
)
def test_many_requests_at_once_are_answered_as_one_at_a_time(
    run: Path, pairs: list[tuple[str, str]], contexts: list[tuple[str, dict[str, Any]]]
):
    together, alone = harness(run, batch_size=4), harness(run, batch_size=1)
    asked = [request("loglikelihood", *pair) for pair in pairs]
    found, expected = together.loglikelihood(asked), alone.loglikelihood(asked)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = [request("loglikelihood_rolling", context) for context, _ in pairs]
    expected = alone.loglikelihood_rolling(texts)
    assert together.loglikelihood_rolling(texts) == pytest.approx(expected, abs=1e-3)
    # The longest that fits, so that all caches are of one length.
    longest = [("a" * 40, {"max_gen_toks": 8})] if contexts else []
    drawn = [request("generate_until", *own) for own in (*contexts, *longest)]
    assert together.generate_until(drawn) == alone.generate_until(drawn)


def test_a_request_that_is_repeated_is_drawn_anew(run: Path):
    model = harness(run)
    how = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    requests = [request("generate_until", "begin", how)] * 4
    texts = model.generate_until(requests)
    assert len(set(texts)) == 4
    assert model.generate_until(requests) == texts


def test_settings_of_a_task_count(run: Path):
    drawn = {"until": [], "do_sample": True, "temperature": 1.0}

    def texts(*how: dict[str, Any]) -> list[str]:
        requests = [request("generate_until", "begin" * 20, one) for one in how]
        return harness(run).generate_until(requests)

    greedy, *others = texts(
        {"max_gen_toks": 12},
        *(drawn | {"max_gen_toks": 12, name: 1} for name in ("top_k", "min_p")),
        {"max_gen_toks": 12, "repetition_penalty": 0.02},
        {"max_gen_toks": 3},
        {"max_new_tokens": 3, "max_tokens": 9},
    )
    assert others[:2] == [greedy] * 2
    assert others[2] != greedy
    assert others[3] == others[4] != greedy
    with pytest.raises(InputError, match="max_gen_toks = 0: must be at least 1"):
        texts({"max_gen_toks": 0})
    unlimited, _ = harness(run)._decode_request("a", {"max_gen_toks": None}, seed=0)
    assert unlimited.max_new_tokens == min(DEFAULT_NEW_TOKENS, harness(run).model.context - 1)


def test_a_continuation_beyond_the_context_is_refused(run: Path):
    with pytest.raises(InputError, match="likelihood of 40 tokens"):
        harness(run).loglikelihood([request("loglikelihood", "a", "b" * 40)])


def test_the_command_runs_tasks_of_ones_own_on_some_of_the_stages(
    run: Path, tasks: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    # It starts pip to list all installed packages.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    asked = ["lm-eval", "--run", run, "--stage-order", "0,2", "--tasks-from", tasks, "--tasks"]
    code, out, _ = command(*asked, "choose,read,write", "--json")
    results = json.loads(out)["results"]
    assert (code, set(results)) == (0, {"choose", "read", "write"})
    assert results["read"]["bits_per_byte,none"] > 0
    model, right = harness(run, stages="0,2"), 0
    for question in QUESTIONS:
        pairs = [(question["question"], " " + choice) for choice in question["choices"]]
        nats = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
        right += int(np.argmax([of_choice for of_choice, _ in nats])) == question["answer"]
    assert results["choose"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    code, out, _ = command(*asked, "choose", "--limit", 2)
    assert (code, "choose" in out) == (0, True)


@pytest.mark.nightly
def test_the_command_takes_several_models(run: Path, tasks: Path, tmp_path: Path, command: Command):
    other = save_run(tmp_path / "other", SECTIONS | {"model": SHAPES | {"width": 24}}, 1)
    asked = ["lm-eval", "--run", run, "--run", tmp_path / "other", "--tasks-from", tasks]
    asked += ["--tasks", "read", "--limit", 1, "--json"]
    text = QUESTIONS[0]["question"]
    ensemble = Ensemble([load_model(run), other], mix="top-1")
    [nats] = HarnessModel(ensemble).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    found = json.loads(command(*asked, "--mix", "top-1")[1])["results"]["read"]
    bits = -nats / np.log(2) / len(text)
    assert found["bits_per_byte,none"] == pytest.approx(bits, abs=1e-3)
    assert "--prior = 'decay': is estimated on text" in command(*asked, "--prior", "decay")[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stage-order 1,2", "--stage-order = '1,2'"),
        ("--tasks choose,chose", "--tasks = 'chose': unknown task"),
        ("--tasks-from nowhere", "--tasks-from = 'nowhere'"),
        ("--batch-size 0", "--batch-size = 0"),
        ("--limit 0", "--limit = 0"),
        ("--num-fewshot -1", "--num-fewshot = -1"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: str, told: str, run: Path, tasks: Path, command: Command
):
    given = ["--run", run, "--tasks", "choose", "--tasks-from", tasks, *words.split()]
    code, _, err = command("lm-eval", *given)
    assert (code, told in err) == (2, True)
