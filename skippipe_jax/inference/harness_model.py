"""A model, or some of its stages, as lm-evaluation-harness asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.config.sampling import DEFAULT_SLOTS, Sampling
from skippipe_jax.data.batches import IGNORED_TARGET
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.inference.decoding import Generator, padded_length
from skippipe_jax.inference.ensemble import Ensemble
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.inference.text_stream import AnswerText

# What the harness itself takes where a task does not say how much is generated.
DEFAULT_NEW_TOKENS = 256
# The names by which tasks say so, as the harness reads them: the first that is given counts.
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

Scored = tuple[list[int], list[int]]
"""Tokens that are given, and tokens whose chances are asked for."""


class HarnessModel(LM):
    """Answers the harness's three kinds of request.

    Every text begins with the tokenizer's begin mark. As in the harness's own models, what does
    not fit into the context is left out at the beginning.
    """

    def __init__(self, model: StagedModel | Ensemble, batch_size: int = DEFAULT_SLOTS):
        """Take a model, or several together, that has `batch_size` sequences at once.

        So many are scored together, and so many slots does generation have.
        """
        super().__init__()
        self.batch_size = fields.integer(batch_size, "--batch-size", 1)
        self.model, self.tokenizer = model, model.tokenizer

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether it is the likeliest one."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-likelihood in nats of each text, in windows of the context where it is longer."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self._encode(request.args[0]),
                    prefix_token=self.tokenizer.begin,
                    max_seq_len=self.model.context,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._score([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the text that goes on from each context, up to the first of its stops."""
        if not requests:
            return []
        # A request that comes again asks for another draw.
        decode_requests = [
            self._decode_request(*instance.args, seed=seed)
            for seed, instance in enumerate(requests)
        ]
        needed = max(len(one.prompt) + one.max_new_tokens for one, _ in decode_requests)
        length = padded_length(needed, self.model.context)
        generator = Generator(
            self.model.decoder(min(self.batch_size, len(decode_requests)), length)
        )
        texts, answers = [""] * len(requests), [answer for _, answer in decode_requests]
        # Prompts of like length run side by side, so attention reads few empty positions of caches.
        for number in sorted(
            range(len(requests)), key=lambda i: -len(decode_requests[i][0].prompt)
        ):
            generator.submit(decode_requests[number][0], number)
        with tqdm(total=len(decode_requests), disable=None) as bar:
            while generator.is_busy:
                for number, is_last, drawn, *_ in generator.step():
                    answer, token = answers[number], None if drawn is None else drawn.token
                    if token == self.tokenizer.end:
                        token = None
                    texts[number] += answer.push(token, is_last=is_last)
                    if answer.has_stopped and not is_last:
                        generator.cancel(number)
                    bar.update(is_last or answer.has_stopped)
        return texts

    def _encode(self, text: str) -> list[int]:
        return list(map(int, self.tokenizer.encode(text)))

    def _pair(self, context: str, continuation: str) -> Scored:
        # A space belongs to the word behind it, as tokenizers have it.
        spaces = context[len(context.rstrip()) :]
        context = context[: len(context) - len(spaces)]
        context_tokens = self._encode(context)
        both = self._encode(context + spaces + continuation)
        return [self.tokenizer.begin, *context_tokens], both[len(context_tokens) :]

    def _score(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Batches of like length, the longest first: what needs most memory comes at once."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        longest_first = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        rows = min(self.batch_size, len(pairs))
        starts = range(0, len(pairs), rows or 1)
        for start in tqdm(starts, unit="batch", disable=None, leave=False):
            chosen = longest_first[start : start + rows]
            tokens, targets = self._rows([pairs[i] for i in chosen], rows)
            nats, greedy = self.model.likelihoods({"tokens": tokens, "targets": targets})
            for i, row_nats, is_greedy in zip(chosen, nats.tolist(), greedy.tolist(), strict=False):
                scores[i] = (row_nats, is_greedy)
        return scores

    def _rows(self, pairs: Sequence[Scored], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets [rows, time]; what is given, and rows that are missing, not counted.

        Raises:
            InputError: if a continuation is longer than the context.
        """
        context = self.model.context
        length = padded_length(max(sum(map(len, pair)) for pair in pairs) - 1, context)
        tokens = np.full((rows, length), self.tokenizer.padding, np.int32)
        targets = np.full_like(tokens, IGNORED_TARGET)
        for row, (context_tokens, continuation) in enumerate(pairs):
            if len(continuation) > context:
                raise InputError(
                    "model.context",
                    context,
                    f"a task requests the likelihood of {len(continuation)} tokens at once",
                    "Remove this task",
                )
            both = [*context_tokens, *continuation][-context - 1 :]
            tokens[row, : len(both) - 1] = both[:-1]
            targets[row, len(both) - 1 - len(continuation) : len(both) - 1] = continuation
        return tokens, targets

    def _decode_request(
        self, context: str, settings: dict[str, Any], *, seed: int
    ) -> tuple[DecodeRequest, AnswerText]:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        limit = self.model.context - 1
        given = {name: own for name in NEW_TOKENS if (own := settings.get(name)) is not None}
        name, asked = next(iter(given.items()), (NEW_TOKENS[0], DEFAULT_NEW_TOKENS))
        count = min(fields.integer(int(asked), name, 1), limit)
        greedy = not settings.get("do_sample", settings.get("temperature", 0) > 0)
        sampling = Sampling(
            temperature=0.0 if greedy else float(settings.get("temperature", 1.0)),
            top_p=float(settings.get("top_p", 1.0)),
            seed=seed,
            top_k=max(int(settings.get("top_k", 0)), 0),
            min_p=float(settings.get("min_p", 0.0)),
            repetition_penalty=float(settings.get("repetition_penalty", 1.0)),
        )
        prompt = [self.tokenizer.begin, *self._encode(context)][count - limit - 1 :]
        answer = AnswerText(self.tokenizer.decode, prompt, stops)
        return DecodeRequest(prompt, count, sampling, frozenset([self.tokenizer.end])), answer
