"""What a request may be, and where its output ends."""

from __future__ import annotations

from typing import Any

import pytest
from embedded_tiny import EOS, LetterTokenizer
from pydantic import ValidationError

from sgl_mega_plugin.embedded.request import Completion, Output, Request, RequestError, output_limit, prompt_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({}, "either text or prompt_ids", id="no-prompt"),
        pytest.param({"text": "a", "prompt_ids": (1,)}, "either text or prompt_ids", id="two-prompts"),
        pytest.param({"text": ""}, "at least 1 character", id="empty-text"),
        pytest.param({"prompt_ids": ()}, "prompt_ids is empty", id="empty-ids"),
        pytest.param({"text": "a", "max_new_tokens": 0}, "greater than or equal to 1", id="no-tokens"),
        pytest.param({"text": "a", "temperature": -0.1}, "greater than or equal to 0", id="cold"),
        pytest.param({"text": "a", "temperature": float("inf")}, "finite number", id="hot"),
        pytest.param({"text": "a", "top_k": 0}, "0 leaves no token; pass -1", id="top-k-0"),
        pytest.param({"text": "a", "top_k": -2}, "greater than or equal to -1", id="top-k"),
        pytest.param({"text": "a", "top_p": 0}, "greater than 0", id="top-p-0"),
        pytest.param({"text": "a", "top_p": 1.1}, "less than or equal to 1", id="top-p"),
        pytest.param({"text": "a", "min_p": -0.1}, "greater than or equal to 0", id="min-p"),
        pytest.param({"text": "a", "stop": ("",)}, "empty stop string", id="empty-stop"),
        pytest.param({"text": "a", "seed": -1}, "greater than or equal to 0", id="seed"),
        pytest.param({"text": "a", "typical_p": 0.9}, "Extra inputs are not permitted", id="unknown"),
    ],
)
def test_bad_requests(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Request(**fields)


def test_which_rows_are_greedy() -> None:
    rows = [
        Request(text="a", temperature=0),
        Request(text="b", temperature=0.7, top_k=1),
        Request(text="c", temperature=0.7),
        Request(text="d", temperature=1e-7, top_k=5),
        Request(text="e", temperature=0.7, top_k=2**40),
    ]
    assert [row.step_temperature for row in rows] == [0.0, 0.0, 0.7, 0.0, 0.7]
    assert [row.step_top_k for row in rows] == [1, 1, 2**30, 1, 2**30]


def test_text_is_put_into_the_chat_format() -> None:
    assert prompt_of(Request(text="bad"), LetterTokenizer(), 24) == [1, 0, 3]


@pytest.mark.parametrize(
    ("request_", "tokenizer", "message"),
    [
        pytest.param(Request(text="a"), None, "needs a tokenizer.*pass prompt_ids", id="text"),
        pytest.param(Request(prompt_ids=(1,), stop=("x",)), None, "need a tokenizer.*pass stop_ids", id="stop"),
        pytest.param(
            Request(prompt_ids=(3, 24, -1)), LetterTokenizer(), r"\[24, -1\] are outside the vocabulary, \[0, 24\)",
            id="ids",
        ),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_served(request_: Request, tokenizer: LetterTokenizer | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt_of(request_, tokenizer, 24)


@pytest.mark.parametrize(
    ("prompt", "wanted", "limit"),
    [
        pytest.param(60, 5, (5, "length"), id="all-that-fits"),
        pytest.param(60, None, (5, "context"), id="until-the-end"),
        pytest.param(64, None, (1, "context"), id="full-prompt"),
        pytest.param(64, 1, (1, "length"), id="full-prompt-one-token"),
        pytest.param(1, 3, (3, "length"), id="short"),
    ],
)
def test_output_limits(prompt: int, wanted: int | None, limit: tuple[int, str]) -> None:
    assert output_limit(Request(text="a", max_new_tokens=wanted), prompt, 64) == limit


@pytest.mark.parametrize(
    ("prompt", "wanted", "message"),
    [
        (65, None, "a prompt of 65 tokens is longer than the context of 64"),
        (60, 6, "max_new_tokens 6 after a prompt of 60 tokens does not fit into the context of 64: at most 5"),
    ],
)
def test_what_does_not_fit(prompt: int, wanted: int | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        output_limit(Request(text="a", max_new_tokens=wanted), prompt, 64)


@pytest.mark.parametrize(
    ("fields", "blocks", "tokens", "text", "reason"),
    [
        pytest.param({}, [[2, 3], [EOS, 4, 5]], [2, 3, EOS], "cd", "stop", id="eos-in-block"),
        pytest.param({}, [[EOS]], [EOS], "", "stop", id="eos-first"),
        pytest.param({"ignore_eos": True}, [[EOS, 4], [5, 6]], [EOS, 4, 5, 6], "befg", "length", id="eos-ignored"),
        pytest.param({"stop_ids": {5}}, [[4, 5, 6]], [4, 5], "e", "stop", id="stop-id"),
        pytest.param({"stop": ("ef",)}, [[3, 4], [5, 6]], [3, 4, 5], "d", "stop", id="stop-across-blocks"),
        pytest.param({"stop": ("f", "ef")}, [[4, 5, 6]], [4, 5], "", "stop", id="earliest-stop"),
        pytest.param({}, [[2], [3, 4, 5, 6]], [2, 3, 4, 5], "cdef", "length", id="limit-in-block"),
        pytest.param({"stop_ids": {5}}, [[2, 3, 4, 5]], [2, 3, 4, 5], "cde", "stop", id="stop-at-the-limit"),
    ],
)
def test_where_an_output_ends(
    fields: dict[str, Any], blocks: list[list[int]], tokens: list[int], text: str, reason: str
) -> None:
    output = Output(Request(text="a", **fields), LetterTokenizer(), limit=4, at_limit="length")
    taken = [token for block in blocks for token in output.extend(block)]
    assert (taken, output.tokens, output.text, output.finish_reason) == (tokens, tokens, text, reason)
    assert output.extend([7]) == []


def test_accept_length_is_the_mean_of_the_steps() -> None:
    completion = Completion(tokens=(1,), text="", finish_reason="stop", steps=2, accept_lengths=(1, 4))
    assert completion.accept_length == 2.5
    assert completion.model_copy(update={"accept_lengths": ()}).accept_length is None
