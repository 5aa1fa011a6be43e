"""Bodies of requests in the format of OpenAI's API, and their validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.chat import Turn
from skippipe_jax.inference.decode_requests import MAX_TOP_TOKENS
from skippipe_jax.inference.partial import StageOrder, checked_order, kept
from skippipe_jax.serving.errors import ApiError, wrong

MOST_CHOICES = 128
MOST_STOPS = 64
LONGEST_STOP = 1000
"""Most characters of a stop text."""
DEFAULT_NEW_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's API."""

_Likeliest = Annotated[int, Meta(ge=0, le=MAX_TOP_TOKENS)]
_Stop = Annotated[str, Meta(max_length=LONGEST_STOP)]
_Path = re.compile(r" - at `\$(?:\[\.\.\.\])?\.?([^`]*)`$")
_UnknownField = re.compile(r"unknown field `([^`]*)`")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both kinds of request; null is the same as leaving a parameter out.

    `skippipe_keep` lists the stages that run, in increasing order, or is the fraction of stages
    that run, drawn by the seed. The parameters from `user` on have no effect.
    """

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MOST_STOPS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    skippipe_keep: float | list[int] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int) -> Sampling:
        """Return the sampling parameters; a larger seed wraps around after `MAX_SEED`.

        Raises:
            ApiError: if a parameter is out of range.
        """
        try:
            return Sampling(
                self.temperature,
                self.top_p,
                seed % (fields.MAX_SEED + 1),
                max(self.top_k, 0),
                self.min_p,
                self.presence_penalty,
                self.frequency_penalty,
                self.repetition_penalty,
            )
        except InputError as error:  # Its field is an option of a command.
            raise wrong(error.field.lstrip("-").replace("-", "_"), error) from error

    def stages(self, count: int, seed: int) -> StageOrder:
        """Return the stages that run, of `count` stages.

        Raises:
            ApiError: if they are not stages of the model in increasing order from 0.
        """
        keep = self.skippipe_keep
        try:
            if not isinstance(keep, list):
                return kept(count, 1.0 if keep is None else keep, 1, seed).variants[0].stages
            order = checked_order(keep, count, "skippipe_keep", keep)
        except InputError as error:
            raise wrong("skippipe_keep", error) from error
        if list(order) != sorted(order):
            raise ApiError(400, "skippipe_keep: must be in increasing order", param="skippipe_keep")
        return order


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Request to continue one or several prompts, each a text or its tokens."""

    prompt: str | list[Any]
    logprobs: _Likeliest | None = None
    echo: bool = False
    best_of: int | None = None

    def __post_init__(self):
        """Refuse a `best_of` that differs from `n`."""
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of: must equal n", param="best_of")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts, each a text or a list of tokens.

        Raises:
            ApiError: if there are none, or one is neither.
        """
        prompts: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and all(type(one) is int for one in prompts):
            prompts = [prompts]
        is_valid = [
            isinstance(one, str)
            or (isinstance(one, list) and all(type(token) is int for token in one))
            for one in prompts
        ]
        if not prompts or not all(is_valid):
            message = "prompt: must be a text, a list of tokens, or a list of texts and token lists"
            raise ApiError(400, message, param="prompt")
        return prompts

    @property
    def most_new_tokens(self) -> int | None:
        """Most new tokens.

        Raises:
            ApiError: if it is 0 and the prompt is not echoed.
        """
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: must be at least 1", param="max_tokens")
        return DEFAULT_NEW_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens returned with each token; None without probabilities."""
        return self.logprobs


class MessagePart(Struct, forbid_unknown_fields=True):
    """Part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct):
    """Message of a conversation; keys that only some chat templates read are dropped."""

    role: str
    content: str | list[MessagePart] | None = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Request to answer a conversation."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: _Likeliest | None = None
    echo: ClassVar[bool] = False

    @property
    def conversation(self) -> Sequence[Turn]:
        """Messages in the form that chat templates take."""
        return [{"role": one.role, "content": _text_of(one.content or "")} for one in self.messages]

    @property
    def most_new_tokens(self) -> int | None:
        """Most new tokens; None for as many as fit into the context.

        Raises:
            ApiError: if `max_tokens` is 0.
        """
        if self.max_tokens == 0:
            raise ApiError(400, "max_tokens: must be at least 1", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens returned with each token; None without probabilities.

        Raises:
            ApiError: if `top_logprobs` is given without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _text_of(content: str | list[MessagePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """Request for the tokens of a text."""

    prompt: str
    add_special_tokens: bool = True
    model: str | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """Request for the text of tokens."""

    tokens: list[int]
    model: str | None = None


StructType = TypeVar("StructType", bound=Struct)


def parse(body: bytes, kind: type[StructType]) -> StructType:
    """Parse the body of a request.

    Raises:
        ApiError: if the body is not a JSON object, or a parameter is unknown or wrong.
    """
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        parameters = {name: value for name, value in decoded.items() if value is not None}
        return msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ApiError):
            raise error.__cause__ from None
        raise _validation_error(str(error)) from error


def _validation_error(problem: str) -> ApiError:
    unknown = _UnknownField.search(problem)
    path = _Path.search(problem)
    field = path[1] if path else ""
    if unknown:
        name = f"{field}.{unknown[1]}" if field else unknown[1]
        return ApiError(400, f"{name}: is not supported", param=name)
    param = field or None
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        param = missing[1]
    text = problem[: path.start()] if path else problem
    return ApiError(400, f"{param}: {text}" if param else text, param=param)
