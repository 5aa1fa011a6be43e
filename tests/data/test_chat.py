"""Conversations: of what is written, only the assistant's answers are learnt."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from skippipe_sched.errors import InputError
from tokenizers import Tokenizer as Tokenizers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from skippipe_jax.config import DataConfig, DocumentSource, parse_config, to_yaml
from skippipe_jax.data import chat
from skippipe_jax.data.batches import TrainingBatches, held_out_batches, load_corpora
from skippipe_jax.data.chat import (
    encode_conversation,
    encode_prompt,
    end_of_turn,
    template_warning,
    trains_on_answers,
)
from skippipe_jax.data.documents import Document
from skippipe_jax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
)
from skippipe_jax.data.tokenizing import train_bpe, write_tokens
from skippipe_jax.storage.files import new_directory
from skippipe_jax.storage.run_dir import RunDir
from tests.harness.messages import refusal

SOURCE = DocumentSource("chat", "chat.jsonl")
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{{ '[' + message.role + ']' + message.content }}{{ eos_token if message.role == 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '[assistant]' }}
{%- endif %}
"""


def document_of(row: dict[str, object]) -> Document:
    return Document("chat.jsonl, line 7", b"", json.dumps(row).encode())


def conversation(messages: object) -> Document:
    return document_of({"messages": messages})


def learnt_texts(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    tokens, learnt = encode_conversation(conversation(messages), SOURCE, tokenizer)
    stretches = np.split(tokens, np.flatnonzero(np.diff(learnt)) + 1)
    texts = [tokenizer.decode(stretch) for stretch in stretches]
    assert not learnt[0]
    return texts[1::2]


@pytest.fixture
def with_template(tmp_path) -> Path:
    folder = tmp_path / "tokenizer"
    text = Document("text", b"", b"[user][assistant][system]")
    train_bpe([(text, DocumentSource("text", "text"))], 262, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_template_of_the_tokenizer_is_followed(with_template):
    tokenizer = load_tokenizer(str(with_template))
    tokens, learnt = encode_conversation(conversation(MESSAGES), SOURCE, tokenizer)
    assert tokens[0] == tokenizer.begin
    text = tokenizer.decode(tokens)
    assert text == "[system]Be short.[user]2 + 2?[assistant]4[user]Sure?[assistant]Yes."
    assert learnt_texts(tokenizer, MESSAGES) == ["4", "Yes."]
    assert (tokens[learnt] == tokenizer.end).sum() == 2
    (with_template / "chat_template.jinja").write_text(TEMPLATE.replace("[", "<"))
    assert "<user]" in tokenizer_text(with_template)


def tokenizer_text(folder: Path) -> str:
    tokenizer = load_tokenizer(str(folder))
    return tokenizer.decode(encode_conversation(conversation(MESSAGES), SOURCE, tokenizer)[0])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{{ messages | length }}", "changes earlier messages when later ones follow"),
        ("{{ messages[0].content }}", "contains no answer"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "fails: access to attribute"),
        ("{% if %}", "is not valid"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}more{% endfor %}{% endfor %}",
            "writes more than 1,000 characters",
        ),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(
    with_template, template, problem, monkeypatch
):
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 1000)
    (with_template / "chat_template.jinja").write_text(template)
    with refusal(f"...{problem}"):
        tokenizer_text(with_template)


QUESTION, ANSWER, GPT = MESSAGES[1], MESSAGES[2], {"from": "gpt", "value": "4"}
TEXT = {"type": "text", "text": "Briefly."}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "hello"}, "has no list of messages; its keys are: messages"),
        ({"messages": ["hello"]}, "messages[0] is not an object"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no text under 'content'"),
        ({"messages": MESSAGES[:2]}, "there is no answer of the assistant"),
        (
            {"messages": [QUESTION, {"role": "bot", "content": "4"}]},
            "the role 'bot' is unknown...: roles are system, user, assistant, tool, and in 'from'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0] has type 'image_url'",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [text]}]},
                f"messages[0].content[0] has type '{text}'",
            )
            for text in ("hi", "text")
        ),
        ({"conversations": [7]}, "conversations[0] is not an object"),
        ({"conversations": [{"from": "gpt"}]}, "conversations[0] has no text under 'value'"),
        ({"conversations": [{"value": "4"}]}, "conversations[0] has no text under 'from'"),
        ({"conversations": [{"role": "user"}]}, "conversations[0] has no text under 'content'"),
        ({"conversations": [{"from": "bot", "value": "4"}]}, "the role 'bot' is unknown"),
        ({"instruction": "2 + 2?"}, "has no list of messages; its keys are: instruction"),
        ({"instruction": "2 + 2?", "output": 4}, "the row has no text under 'output'"),
    ],
)
def test_what_is_no_conversation_is_named_with_its_line(row: dict[str, object], problem: str):
    with refusal(f"data.path = ...chat.jsonl, line 7: {problem}"):
        encode_conversation(document_of(row), SOURCE, ByteTokenizer())


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "2 + 2?\n\nBriefly."}, GPT]},
        {"conversations": [{"role": "user", "content": "2 + 2?\n\nBriefly."}, ANSWER]},
        {"instruction": "2 + 2?", "input": "Briefly.", "output": "4"},
        {"messages": [{"role": "user", "content": [TEXT | {"text": "2 + 2?\n\n"}, TEXT]}, ANSWER]},
    ],
)
def test_rows_as_in_share_gpt_and_alpaca_and_parts_of_text_are_conversations(
    row: dict[str, object],
):
    messages = [{"role": "user", "content": "2 + 2?\n\nBriefly."}, ANSWER]
    expected = encode_conversation(conversation(messages), SOURCE, ByteTokenizer())
    found = encode_conversation(document_of(row), SOURCE, ByteTokenizer())
    for own, other in zip(found, expected, strict=True):
        assert own.tolist() == other.tolist()


SAYS_ITSELF = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'model' %}
[model]
        {%- generation %}
{{ message.content }}{{ eos_token }}
        {%- endgeneration %}
    {%- else %}
[{{ message.role }}]{{ message.content | trim }}
    {% endif %}
{%- endfor %}
"""


def test_what_a_template_says_is_generated_is_learnt(with_template):
    (with_template / "chat_template.jinja").write_text(SAYS_ITSELF)
    tokenizer = load_tokenizer(str(with_template))
    messages = [
        {"role": one["role"].replace("assistant", "model"), "content": one["content"]}
        for one in MESSAGES
    ]
    tokens, learnt = encode_conversation(conversation(messages), SOURCE, tokenizer)
    theirs = PreTrainedTokenizerFast.from_pretrained(with_template).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == theirs["input_ids"]
    assert learnt.tolist() == [bool(one) for one in theirs["assistant_masks"]]
    assert [text.strip() for text in learnt_texts(tokenizer, messages)] == ["4", "Yes."]
    with pytest.raises(InputError, match="contains no answer"):
        encode_conversation(conversation(messages[:2]), SOURCE, tokenizer)
    with pytest.raises(InputError, match="contains no answer"):
        encode_conversation(conversation([]), SOURCE, tokenizer)


def test_a_template_writes_the_day_that_it_is_told(with_template):
    template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    (with_template / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(with_template))
    source = replace(SOURCE, today="2026-11-22")
    tokens, _ = encode_conversation(conversation(MESSAGES), source, tokenizer)
    assert tokenizer.decode(tokens).startswith("22 Nov 2026[system]")
    with refusal("data.today = None...writes the date"):
        tokenizer_text(with_template)
    # A template may have a date of its own.
    own = "{{ strftime_now('%Y') if strftime_now is defined else '2024' }}"
    (with_template / "chat_template.jinja").write_text(own + TEMPLATE)
    assert tokenizer_text(with_template).startswith("2024[system]")


@pytest.mark.parametrize(
    ("name", "before"),
    [("plain", "[BOS]<|user|>\nhi\n<|assistant|>\n"), ("file.jinja", "[hi]")],
)
def test_a_template_that_is_named_is_followed_and_kept(
    name: str, before: str, with_template: Path, tmp_path: Path
):
    file = tmp_path / "file.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    source = replace(SOURCE, chat_template=str(file) if name == "file.jinja" else name)
    tokenizer = load_tokenizer(str(with_template))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tokens, learnt = encode_conversation(conversation(messages), source, tokenizer)
    begin = [tokenizer.begin] if before.startswith("[BOS]") else []
    expected = [*begin, *tokenizer.encode(before.removeprefix("[BOS]"))]
    assert tokens[: len(expected)].tolist() == expected
    assert learnt.tolist() == [n >= len(expected) for n in range(len(tokens))]

    data = DataConfig(
        source="chat",
        path="chat.jsonl",
        packing="documents",
        tokenizer=str(with_template),
        chat_template=source.chat_template,
    )
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.keep_tokenizer(data)
    run.keep_chat_template(data)
    file.unlink()
    kept = run.with_tokenizer(data)
    [again] = kept.sources()
    exported = load_tokenizer(str(run.path / "tokenizer"))
    for own in (again, SOURCE):
        same, _ = encode_conversation(conversation(messages), own, exported)
        assert same.tolist() == tokens.tolist()


def test_a_tokenizer_without_a_template_is_warned_of_where_none_is_named(
    with_template: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = load_tokenizer(str(with_template))
    assert not template_warning([SOURCE], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    [warning] = template_warning([SOURCE], tokenizer)
    assert "has no template. Set data.chat_template to plain, chatml" in warning
    assert not template_warning([replace(SOURCE, chat_template="plain")], tokenizer)
    assert not template_warning([SOURCE], ByteTokenizer())


@pytest.mark.parametrize(
    ("name", "said"), [("chat-ml", "Did you mean chatml?"), ("missing.jinja", "Write plain")]
)
def test_a_template_that_is_not_there_is_refused(name: str, said: str, with_template: Path):
    source = replace(SOURCE, chat_template=name)
    with refusal(f"data.chat_template = ...{said}"):
        encode_conversation(conversation(MESSAGES), source, load_tokenizer(str(with_template)))


def add_tokens(folder: Path, *tokens: str) -> None:
    """Let the tokenizer in a folder have these special tokens too."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizers.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)


@pytest.mark.parametrize(
    ("name", "tokens", "end"),
    [
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
        ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        ("plain", [], "<|end_of_text|>"),
    ],
)
def test_a_template_needs_a_tokenizer_with_its_tokens_and_ends_answers_by_one(
    name: str, tokens: list[str], end: str, with_template: Path
):
    source = replace(SOURCE, chat_template=name)
    if tokens:
        add_tokens(with_template, *tokens[:-1])
        without = load_tokenizer(str(with_template))
        told = f"data.chat_template = '{name}'...does not have the tokens {end}...Write plain"
        with refusal(told):
            template_warning([source], without)
        add_tokens(with_template, end)
    (with_template / "chat_template.jinja").write_text(chat.TEMPLATES[name])
    tokenizer = load_tokenizer(str(with_template))
    learnt, _ = encode_conversation(conversation(MESSAGES), source, tokenizer)
    prompt = encode_prompt(MESSAGES[:2], tokenizer, "2026-11-22")
    assert prompt.tolist() == learnt[: len(prompt)].tolist()
    token = tokenizer.token_of(end)
    assert end_of_turn(tokenizer, "2026-11-22") == (end, token)
    assert token in learnt[len(prompt) :].tolist()[:3]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}<|no_token|>{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}</s>",
    ],
)
def test_a_template_may_end_answers_by_no_token(template: str, with_template: Path):
    (with_template / "chat_template.jinja").write_text(template)
    assert end_of_turn(load_tokenizer(str(with_template)), "2026-11-22") is None


def test_a_prompt_of_bytes_is_written_as_conversations_are_without_a_template():
    tokenizer = ByteTokenizer()
    tokens, learnt = encode_conversation(conversation(MESSAGES), SOURCE, tokenizer)
    assert tokens[learnt].tolist() == [*b"4", tokenizer.end, *b"Yes.", tokenizer.end]
    prompt = encode_prompt(MESSAGES[:2], tokenizer, "2026-11-22")
    before = b"<|system|>\nBe short.\n<|user|>\n2 + 2?\n<|assistant|>\n"
    assert prompt.tolist() == [tokenizer.begin, *before] == tokens[: len(prompt)].tolist()
    assert end_of_turn(tokenizer, "2026-11-22") is None


def test_the_day_is_kept_in_the_configuration():
    data = {"source": "chat", "path": "a", "packing": "documents", "tokenizer": "bytes"}
    config = parse_config({"data": data}, ["data.today=2026-11-22"])
    assert config.data.today == config.data.sources()[0].today == "2026-11-22"
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


@pytest.fixture
def long_and_short(tmp_path) -> DataConfig:
    """Conversations of which every fourth is longer than a sequence."""
    return conversations(tmp_path, [(f"{n:02}", "a" * (8 if n % 4 else 80)) for n in range(40)])


def conversations(folder: Path, turns: list[tuple[str, str]]) -> DataConfig:
    """A question and an answer on each line, for sequences of 64 tokens."""
    roles = ("user", "assistant")
    rows = [
        [{"role": role, "content": text} for role, text in zip(roles, turn, strict=True)]
        for turn in turns
    ]
    lines = [json.dumps({"messages": row}) + "\n" for row in rows]
    (folder / "chat.jsonl").write_text("".join(lines))
    return DataConfig(
        "chat",
        str(folder / "chat.jsonl"),
        packing="documents",
        sequence_length=64,
        microbatch_size=1,
        held_out=0.4,
    )


def learnt_letters(config: DataConfig) -> tuple[int, int]:
    """How many letters of answers are targets in an epoch, and in the held-out part."""
    batches = TrainingBatches(config)
    training = [batches[number] for number in range(len(batches._rows[0]))]
    parts = (training, held_out_batches(config, 1))
    letters = [sum((one["targets"] == ord("a")).sum() for one in part) for part in parts]
    return int(letters[0]), int(letters[1])


def parts_of(config: DataConfig) -> list[tuple[int, int]]:
    """How many conversations are longer than a sequence, and how many there are, of both parts."""
    [corpus] = load_corpora(config)
    sizes = [np.diff(part.ends, prepend=0) for part in (corpus.training, corpus.held_out)]
    return [(int((part > config.sequence_length + 1).sum()), len(part)) for part in sizes]


# Before the answer there are the begin mark, <|user|>, 2 letters, <|assistant|> and 3 ends of
# lines; the last token that is kept has a target too.
@pytest.mark.parametrize(
    ("too_long", "told", "letters"),
    [
        (None, "dropped", 0),
        ("drop", "dropped", 0),
        ("split", "split", 80),
        ("truncate", "truncated", 64 + 1 - (1 + 8 + 2 + 13 + 3)),
    ],
)
def test_conversations_longer_than_a_sequence_are_counted_and_dropped_unless_the_user_says_so(
    long_and_short, too_long, told, letters
):
    config = replace(long_and_short, too_long=too_long)
    (long, every), (long_out, every_out) = parts = parts_of(config)
    assert min(long, long_out) > 0
    expected = [8 * (whole - cut) + letters * cut for cut, whole in parts]
    assert [*learnt_letters(config)] == expected
    counts = f"{long} of {every} documents (training) and {long_out} of {every_out} documents (held"
    assert TrainingBatches(config).too_long == [
        f"{config.path}: {counts} out) are longer than a sequence of 64 tokens, and {told} "
        "(data.too_long)"
    ]
    # Nothing is said where all is as long as it may be.
    assert not TrainingBatches(replace(config, sequence_length=128)).too_long


def test_conversations_that_lose_their_answers_by_being_truncated_are_counted(tmp_path):
    turns = [(f"{n:02}" * (1 if n % 4 else 30), "a" * 8) for n in range(40)]
    config = replace(conversations(tmp_path, turns), too_long="truncate")
    assert [*learnt_letters(config)] == [8 * (every - long) for long, every in parts_of(config)]
    [line] = TrainingBatches(config).too_long
    assert line.endswith("truncated (data.too_long); 10 of them have no tokens left to train on")


@pytest.mark.parametrize(
    ("too_long", "left"),
    [("drop", "drop leaves no documents"), ("truncate", "no tokens to train on")],
)
def test_conversations_that_are_all_too_long_are_refused(long_and_short, too_long, left):
    config = replace(long_and_short, too_long=too_long, sequence_length=16)
    for read in (TrainingBatches, lambda config: held_out_batches(config, 1)):
        with pytest.raises(InputError, match=rf"all \d+ documents of .* are longer, .*{left}"):
            read(config)


def test_a_position_among_conversations_that_were_cut_otherwise_is_refused(long_and_short):
    dropped = TrainingBatches(long_and_short)
    split = TrainingBatches(replace(long_and_short, too_long="split"))
    for one, other in ((dropped, split), (split, dropped)):
        assert one.position(json.loads(json.dumps(one.state(3)))) == 3
        with refusal("data_state.too_long = "):
            one.position(other.state(3))
    # Older checkpoints do not say; all conversations were split.
    state = split.state(3)
    del state["too_long"]
    assert split.position(state) == 3
    with pytest.raises(InputError):
        dropped.position(state)


@pytest.mark.parametrize("too_long", [None, "split", "truncate"])
def test_tokens_of_conversations_make_the_batches_that_the_conversations_make(
    long_and_short, with_template, tmp_path, too_long
):
    config = replace(
        long_and_short, too_long=too_long, tokenizer=str(with_template), sequence_length=48
    )
    [source] = config.sources()
    with new_directory(tmp_path / "tokens", "--output") as folder:
        copy_tokenizer(str(with_template), folder / "tokenizer")
        write_tokens(folder, [source], str(with_template), config.held_out, 0, processes=1)
    path, held_out = str(tmp_path / "tokens"), DataConfig.held_out
    of_tokens = replace(config, source="tokens", path=path, tokenizer=None, held_out=held_out)
    assert trains_on_answers(of_tokens)
    assert trains_on_answers(config)
    assert not trains_on_answers(replace(of_tokens, path=str(tmp_path / "gone")))
    ours, theirs = TrainingBatches(of_tokens), TrainingBatches(config)
    assert ours.state(7) == theirs.state(7)
    assert [line.removeprefix(path) for line in ours.too_long] == [
        line.removeprefix(str(config.path)) for line in theirs.too_long
    ]
    pairs = [(ours[number], theirs[number]) for number in (0, 1, 50, 3)]
    both = (held_out_batches(one, 2) for one in (of_tokens, config))
    for one, other in [*pairs, *zip(*both, strict=True)]:
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    with refusal("data.packing = ...contains conversations"):
        TrainingBatches(replace(of_tokens, packing="windows", too_long=None))
