"""What goes into the embedded engine and what comes out: requests, their checks, their outputs.

All decisions about single tokens on the host are here: which stop a request, and what text
they make. A step commits whole blocks; :class:`Output` takes a block's tokens one by one and
says where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, Self

from pydantic import Field, field_validator, model_validator

from sgl_mega_plugin.contract import Record

FinishReason = Literal["stop", "length", "context"]
WHOLE_VOCABULARY = 1 << 30  # the top_k that filters nothing
_GREEDY_BELOW = 1e-6  # SGLang takes a lower temperature for 0


class RequestError(ValueError):
    """A request that this engine cannot serve, found before anything runs."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    def chat(self, *turns: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Request(Record):
    """A prompt, as ``text`` (one user turn, put into the chat format) or as ids, and how to continue it."""

    text: str | None = Field(default=None, min_length=1)
    prompt_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = Field(default=128, ge=1)  # None: until the context ends
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1)  # 1 is greedy at any temperature, -1 takes the whole vocabulary
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)  # in parts of the likeliest token's probability
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**63)  # None: the engine counts

    @field_validator("top_k")
    @classmethod
    def _keeps_a_token(cls, top_k: int) -> int:
        if top_k == 0:
            raise ValueError("0 leaves no token; pass -1 for the whole vocabulary")
        return top_k

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.text is None) == (self.prompt_ids is None):
            raise ValueError("a request has either text or prompt_ids")
        if self.prompt_ids is not None and not self.prompt_ids:
            raise ValueError("prompt_ids is empty; a prompt has at least one token")
        if "" in self.stop:
            raise ValueError("an empty stop string would stop everything; remove it")
        return self

    @property
    def step_temperature(self) -> float:
        """The temperature that a step uses: 0 on greedy rows."""
        return 0.0 if self.step_top_k == 1 else self.temperature

    @property
    def step_top_k(self) -> int:
        """The top_k that a step uses, as SGLang rewrites it: 1 on greedy rows, ``WHOLE_VOCABULARY`` for -1."""
        if self.temperature < _GREEDY_BELOW:
            return 1
        return WHOLE_VOCABULARY if self.top_k == -1 else min(self.top_k, WHOLE_VOCABULARY)


class Completion(Record):
    """The tokens of a request (its stop token included) and their text (without the stop)."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    steps: int  # after the prefill
    accept_lengths: tuple[int, ...]  # tokens committed by each step, bonus included, before the host trims

    @property
    def accept_length(self) -> float | None:
        """Mean of ``accept_lengths``; None if no step ran."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else None


def prompt_of(request: Request, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """A request's prompt ids, each in [0, V)."""
    if request.prompt_ids is not None:
        ids = list(request.prompt_ids)
    elif tokenizer is not None and request.text is not None:
        ids = tokenizer.chat(request.text)
    else:
        raise RequestError("a request with text needs a tokenizer, and this model has none; pass prompt_ids")
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise RequestError(f"prompt ids {wrong[:5]} are outside the vocabulary, [0, {vocab_size})")
    if request.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this model has none; pass stop_ids")
    return ids


def output_limit(request: Request, prompt_tokens: int, max_context: int) -> tuple[int, FinishReason]:
    """How many tokens a request may get, and what its end is called then.

    The context holds the KV of ``max_context`` tokens; the last token of an output needs none.
    """
    room = max_context - prompt_tokens + 1
    if room < 1:
        raise RequestError(
            f"a prompt of {prompt_tokens} tokens is longer than the context of {max_context}; "
            "shorten it or raise max_context"
        )
    if request.max_new_tokens is None:
        return room, "context"
    if request.max_new_tokens > room:
        raise RequestError(
            f"max_new_tokens {request.max_new_tokens} after a prompt of {prompt_tokens} tokens does not fit into "
            f"the context of {max_context}: at most {room}; lower it, pass None, or raise max_context"
        )
    return request.max_new_tokens, "length"


class Output:
    """The growing output of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, limit: int, at_limit: FinishReason) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer, self._stop = tokenizer, request.stop
        self._limit, self._at_limit = limit, at_limit
        eos = frozenset() if request.ignore_eos or tokenizer is None else tokenizer.eos_ids
        self._stop_ids = request.stop_ids | eos
        self._text: str | None = None  # set where a stop string cut it

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens up to and including the one that ends the request; returns those taken."""
        taken: list[int] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            taken.append(token)
            self.tokens.append(token)
            self.finish_reason = self._ends(token)
        return taken

    def _ends(self, token: int) -> FinishReason | None:
        if token in self._stop_ids:
            return "stop"
        if self._stop and self._tokenizer is not None:
            text = self._tokenizer.decode(self.tokens)
            starts = [start for start in map(text.find, self._stop) if start >= 0]
            if starts:
                self._text = text[: min(starts)]
                return "stop"
        return self._at_limit if len(self.tokens) == self._limit else None

    @property
    def text(self) -> str:
        """Text without the stop token or stop string; empty without a tokenizer."""
        if self._text is not None or self._tokenizer is None:
            return self._text or ""
        stopped = self.finish_reason == "stop"
        return self._tokenizer.decode(self.tokens[:-1] if stopped else self.tokens)
