"""A model that a service computes: log-probabilities over HTTP, by the API that `serving` has."""

from __future__ import annotations

import http.client
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from jaxtyping import Float
from msgspec import Struct
from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config import DataConfig
from skippipe_jax.config.api_keys import header_with
from skippipe_jax.config.sampling import DEFAULT_SLOTS
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, load_corpora, tokenizer_of
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.inference.partial import StageOrder, full

IN_FLIGHT = DEFAULT_SLOTS
"""Requests that wait for an answer at a time: as many as a service has slots by default."""
BATCH_SEQUENCES = 4 * IN_FLIGHT
"""Sequences of a batch, between which all answers are waited for."""
CONNECT_S = 10.0
ANSWER_S = 600.0
"""Seconds that a connection, and an answer on it, may take."""
RETRY_S = 1.0
"""After how long a request is sent again where a service that has no room does not say."""
SAMPLE_TOKENS = 500
"""Tokens of the held-out text by which tokenizers are compared."""

OK, UNAUTHORIZED, TOO_MANY = 200, 401, 429


class _Stages(Struct):
    stages: list[int]


class _Model(Struct):
    id: str
    max_model_len: int
    skippipe: _Stages


class _Models(Struct):
    data: list[_Model]


class _Tokens(Struct):
    tokens: list[int]


class _Scores(Struct):
    token_logprobs: list[float | None]


class _Choice(Struct):
    logprobs: _Scores
    skippipe: _Stages


class _Completion(Struct):
    choices: list[_Choice]


class _Error(Struct):
    message: str
    param: str | None = None
    code: str | None = None


class _Refusal(Struct):
    error: _Error


StructType = TypeVar("StructType", bound=Struct)


class RemoteModel:
    """A model behind the API of a service, which runs any of its stages in their order.

    Attributes:
        url: of the API, such as http://127.0.0.1:8000/v1.
        tokenizer: that of the text, and of the model.
        stages: how many there are.
        context: how many tokens a sequence has at most, without the target of its last position.
        used: how many requests asked for some stages, and were answered by some; these differ where
            the service skips stages.
    """

    def __init__(self, url: str, data: DataConfig, key_file: Path | None = None):
        """Ask which model is served at `url`.

        The first line of `key_file`, if there is one, is the API key.

        Raises:
            InputError: if no service of ours answers there, it does not take the key, there is no
                key in the file, the model's tokenizer is not that of the data, or there is no text.
        """
        self.url = url.rstrip("/")
        self.tokenizer = load_tokenizer(tokenizer_of(data))
        self.used = Counter[tuple[StageOrder, StageOrder]]()
        self._connection, self._path = _address(self.url)
        self._headers = {"Content-Type": "application/json"} | header_with(key_file)
        self._key_file = key_file
        self._is_known = False
        models = self._answer(_Models, "GET", f"{self._path}/models").data
        if len(models) != 1:
            raise self._no_service(f"the service has {len(models)} models, not one")
        [model] = models
        self._name, self.context = model.id, model.max_model_len
        self.stages = len(model.skippipe.stages)
        self._is_known = True
        self._require_tokenizer(data)

    def log_probabilities(
        self, batch: Batch, order: Sequence[int] | None = None
    ) -> Float[np.ndarray, "sequence position"]:
        """Return the log-probability of each target of a batch in nats; 0 where it is not counted.

        `order` names the stages that are asked for, by default all. Of documents that are packed
        into one sequence, each is a request of its own, as they do not see each other.

        Raises:
            InputError: if the service does not run these stages, takes no sequences of this length
                or no tokens of this vocabulary, or ends.
        """
        requested = full(self.stages) if order is None else tuple(order)
        texts = list(texts_of(batch))
        log_probabilities = np.zeros(batch["targets"].shape)
        cancelled = threading.Event()
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            try:
                answers = threads.map(
                    lambda text: self._score(text[2], requested, cancelled), texts
                )
                for (row, start, tokens), answer in zip(texts, answers, strict=True):
                    # What is infinite or no number comes as null, which is NaN here.
                    scores = np.array(answer.logprobs.token_logprobs[1:], np.float64)
                    log_probabilities[row, start : start + len(tokens) - 1] = scores
                    self.used[requested, tuple(answer.skippipe.stages)] += 1
            finally:
                cancelled.set()
        return np.where(batch["targets"] == IGNORED_TARGET, 0.0, log_probabilities)

    def to_json(self) -> dict[str, Any]:
        """List under `used` which stages were asked for and used, and by how many requests."""
        each = [
            {"asked": asked, "used": used, "requests": count}
            for (asked, used), count in sorted(self.used.items())
        ]
        return {"used": each}

    def table(self) -> str:
        """Return the same as a table, below the address of the service."""
        rows = [
            [*(" ".join(map(str, order)) for order in orders), f"{count:,}"]
            for orders, count in sorted(self.used.items())
        ]
        shown = aligned([["stages requested", "used", "requests"], *rows], [0, 1])
        return f"computed by {self._name} at {self.url}\n{shown}"

    def _score(
        self, tokens: Sequence[int], order: StageOrder, cancelled: threading.Event
    ) -> _Choice:
        """Return what the service says of a sequence, waiting where it has no room."""
        body = {
            "model": self._name,
            "prompt": tokens,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "skippipe_keep": order,
        }
        path = f"{self._path}/completions"
        choices = self._answer(_Completion, "POST", path, body, cancelled).choices
        if len(choices) != 1 or len(choices[0].logprobs.token_logprobs) != len(tokens):
            raise self._no_service("the service did not return one probability for each token")
        return choices[0]

    def _require_tokenizer(self, data: DataConfig) -> None:
        """Refuse a model that makes other tokens of the held-out text than the data do."""
        sample = load_corpora(data)[0].held_out.tokens[:SAMPLE_TOKENS]
        text = self.tokenizer.decode(sample)
        body = {"prompt": text, "add_special_tokens": False}
        path = f"{self._path.removesuffix('/v1')}/tokenize"
        tokens = self._answer(_Tokens, "POST", path, body).tokens
        if tokens != self.tokenizer.encode(text).tolist():
            raise InputError(
                "--url",
                self.url,
                f"the tokenizer of the served model, {self._name}, differs from that of the text",
                "Give --run or --hf of the served model, or set its data.tokenizer",
            )

    def _answer(
        self,
        kind: type[StructType],
        method: str,
        path: str,
        body: Any = None,
        cancelled: threading.Event | None = None,
    ) -> StructType:
        """Return what the service answers; a request that finds no room is sent again.

        Once `cancelled` is set, it is not.

        Raises:
            InputError: if it does not answer, or refuses.
        """
        cancelled = cancelled or threading.Event()
        while True:
            status, retry_s, content = self._exchange(method, path, body)
            if status != TOO_MANY or cancelled.wait(retry_s):
                break
        if status != OK:
            raise self._refused(status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise self._no_service(f"is not a SkipPipe service ({error})") from error

    def _exchange(self, method: str, path: str, content: Any) -> tuple[int, float, bytes]:
        """Return status, Retry-After in seconds and body of the answer to one request."""
        body = None if content is None else msgspec.json.encode(content)
        kind, host, port = self._connection
        connection = kind(host, port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, path, body, self._headers)
            answer = connection.getresponse()
            retry_after = answer.headers.get("Retry-After", "")
            retry_s = float(retry_after) if retry_after.isdecimal() else RETRY_S
            return answer.status, min(retry_s, threading.TIMEOUT_MAX), answer.read()
        # A name with letters that no name has is a UnicodeError.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if not self._is_known:
                raise self._no_service(f"no service answers at this address ({error})") from error
            problem = f"the service has ended or does not answer ({error})"
            raise InputError("--url", self.url, problem, "Start it and evaluate again") from error
        finally:
            connection.close()

    def _refused(self, status: int, content: bytes) -> InputError:
        """Return the error of a request that is answered by another status than OK."""
        if status == UNAUTHORIZED:
            problem = f"the service at {self.url} requires one of its API keys"
            remedy = "Give a file whose first line is one of its keys"
            shown = None if self._key_file is None else str(self._key_file)
            return InputError("--api-key-file", shown, problem, remedy)
        try:
            error = msgspec.json.decode(content, type=_Refusal).error
        except msgspec.DecodeError:
            error = _Error("")
        if not self._is_known:
            return self._no_service(f"is not a SkipPipe service (status {status})")
        remedy = "Read the log of the service, and evaluate again"
        if error.code == "context_length_exceeded":
            shorter = f"--set data.sequence_length={self.context}"
            remedy = f"Serve it with a larger --max-model-len, or add {shorter}"
        elif error.param == "skippipe_keep":
            remedy = "Request other stages: a service runs stages in increasing order"
        elif error.param in ("prompt", "model"):
            remedy = "Give --run or --hf of the served model"
        problem = f"the service answered a request with status {status}: {error.message}"
        return InputError("--url", self.url, problem.removesuffix(": "), remedy)

    def _no_service(self, problem: str) -> InputError:
        remedy = "Write the address that skippipe serve prints, such as http://127.0.0.1:8000/v1"
        return InputError("--url", self.url, problem, remedy)


Connection = tuple[type[http.client.HTTPConnection], str, int | None]


def _address(url: str) -> tuple[Connection, str]:
    """Return how to connect to a URL, and its path.

    Raises:
        InputError: if it is none of HTTP.
    """
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(url)
        kind, host, port = kinds[parts.scheme], parts.hostname, parts.port
        if not host or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError
    except (KeyError, ValueError) as error:
        remedy = "Write an address such as http://127.0.0.1:8000/v1"
        raise InputError("--url", url, "is not the address of a service", remedy) from error
    return (kind, host, port), parts.path


def texts_of(batch: Batch) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the texts of a batch of which each sees nothing of the others.

    Of each: its row, its first position, and its tokens up to the last target that counts, which is
    the last of them. One without such targets is left out.
    """
    begins = batch.get("begins", np.zeros(batch["tokens"].shape, bool))
    for row, (tokens, targets) in enumerate(zip(batch["tokens"], batch["targets"], strict=True)):
        starts = np.union1d([0], np.flatnonzero(begins[row])).tolist()
        for start, stop in itertools.pairwise([*starts, len(tokens)]):
            counted = np.flatnonzero(targets[start:stop] != IGNORED_TARGET)
            if counted.size:
                last = start + int(counted[-1])
                yield row, start, [*tokens[start : last + 1].tolist(), int(targets[last])]


def with_large_batches(data: DataConfig) -> DataConfig:
    """Return data in batches that give a service enough to do at a time."""
    return replace(data, microbatch_size=max(data.microbatch_size, BATCH_SEQUENCES))
