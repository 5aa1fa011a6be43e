"""Conversations: of what is written, only the assistant's answers are learnt."""

import json
from pathlib import Path

import numpy as np
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, DocumentSource
from skippipe_jax.data.batches import TrainingBatches, load_corpora
from skippipe_jax.data.chat import encode_conversation
from skippipe_jax.data.documents import Document
from skippipe_jax.data.rows import NOT_COUNTED
from skippipe_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from skippipe_jax.data.tokenizing import train_bpe

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


def conversation(messages: object) -> Document:
    return Document("chat.jsonl, line 7", b"", json.dumps({"messages": messages}).encode())


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
    train_bpe([(text, SOURCE)], 262, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_plain_way_of_writing():
    tokenizer = ByteTokenizer()
    tokens, learnt = encode_conversation(conversation(MESSAGES), SOURCE, tokenizer)
    before = b"<|system|>\nBe short.\n<|user|>\n2 + 2?\n<|assistant|>\n"
    assert tokens[: len(before) + 3].tolist() == [tokenizer.begin, *before, *b"4", tokenizer.end]
    assert tokens[learnt].tolist() == [*b"4", tokenizer.end, *b"Yes.", tokenizer.end]


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
        ("{{ messages | length }}", "writes earlier messages anew"),
        ("{{ messages[0].content }}", "nothing is an answer"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "fails: access to attribute"),
        ("{% if %}", "is not valid"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(with_template, template, problem):
    (with_template / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=problem):
        tokenizer_text(with_template)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "has no list of messages, but messages"),
        (["hello"], r"messages\[0\] is no object"),
        ([{"role": "user"}], r"messages\[0\] has no text under 'content'"),
        (MESSAGES[:2], "there is no answer of the assistant"),
    ],
)
def test_what_is_no_conversation_is_named_with_its_line(messages, problem):
    with pytest.raises(InputError, match=f"chat.jsonl, line 7: {problem}") as caught:
        encode_conversation(conversation(messages), SOURCE, ByteTokenizer())
    assert caught.value.field == "data.path"


def test_training_batches_count_answers_only(tmp_path):
    rows = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * (n + 3)}]
        for n in range(1, 25)
    ]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    )
    config = DataConfig(
        "chat",
        str(tmp_path / "chat.jsonl"),
        packing="documents",
        sequence_length=128,
        microbatch_size=1,
        held_out=0.2,
    )
    batches = TrainingBatches(config)
    [corpus] = load_corpora(config)
    counted = np.concatenate([batches[n]["targets"] for n in range(len(batches._rows[0]))])
    counted = counted[counted != NOT_COUNTED]
    assert set(counted.tolist()) == {ord("a"), ByteTokenizer.end}
    assert corpus.training.learnt is not None
    assert len(counted) == corpus.training.learnt.sum() > 0
