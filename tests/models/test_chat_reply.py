"""Replies: encode, parse, encode again; cut anywhere; and broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from openkda.models.chat import Segment, chat_segments
from openkda.models.chat_reply import parse_reply
from openkda.models.tiktoken_file import TiktokenTokenizer

TOKENIZER = TiktokenTokenizer({bytes([i]): i for i in range(256)})
ASK = [{"role": "user", "content": "?"}]
MARKS = "<|close|>think<|sep|> is not the end"


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES: list[dict[str, Any]] = [
    {"content": "plain"},
    {"content": "", "reasoning_content": ""},
    {"content": f"你好 {MARKS}", "reasoning_content": f"é {MARKS}"},
    {"content": "c", "reasoning_content": "r", "tool_calls": [call("f", "{}")]},
    {
        "content": "",
        "tool_calls": [
            call('a"b&amp;c', '{"s": "x\\"y\\\\ 北", "n": 1e2, "l": [1, {"q": null}], "t": true, "z": null}'),
            call("broken", '{"city":'),
            call(MARKS, '{"' + MARKS + '": "' + MARKS + '"}'),
        ],
    },
]


def reply_ids(message: dict[str, Any], thinking: bool) -> tuple[list[int], list[int]]:
    """(all ids, the part behind the generation prompt) of one question and its answer."""
    conversation = [*ASK, {"role": "assistant", **message}]
    whole = TOKENIZER.encode_segments(chat_segments(conversation, thinking=thinking, add_generation_prompt=False))
    prompt = TOKENIZER.encode_segments(chat_segments(ASK, thinking=thinking))
    assert whole[: len(prompt)] == prompt, "a generation prompt is the beginning of the answered conversation"
    return whole, whole[len(prompt) :]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("message", MESSAGES, ids=["plain", "empty", "markers", "call", "calls"])
def test_round_trip(message: dict[str, Any], thinking: bool) -> None:
    whole, ids = reply_ids(message, thinking)
    reply = parse_reply(TOKENIZER, ids, thinking=thinking)
    assert reply.complete
    assert reply.message["content"] == message["content"]
    assert reply.message.get("reasoning_content", "") == (message.get("reasoning_content", "") if thinking else "")
    assert [c["function"]["name"] for c in reply.message.get("tool_calls", [])] == [
        c["function"]["name"] for c in message.get("tool_calls", [])
    ]
    again = chat_segments([*ASK, reply.message], thinking=thinking, add_generation_prompt=False)
    assert TOKENIZER.encode_segments(again) == whole
    assert parse_reply(TOKENIZER, [*ids, *ids], thinking=thinking) == reply, "what follows the end is ignored"


def test_cut_anywhere() -> None:
    """Every prefix parses, never claims to be complete, and never invents a call."""
    message = MESSAGES[4]
    _, ids = reply_ids(message, True)
    names = [c["function"]["name"] for c in message["tool_calls"]]
    for n in range(len(ids)):
        reply = parse_reply(TOKENIZER, ids[:n])
        got = [c["function"]["name"] for c in reply.message.get("tool_calls", [])]
        assert got == names[: len(got)]
        assert reply.complete == (n == len(ids) - 1), "only the end mark itself may be missing"


def ids_of(*segments: str) -> list[int]:
    return TOKENIZER.encode_segments(Segment(s.strip("!"), s.startswith("!")) for s in segments)


O, C, S = "!<|open|>", "!<|close|>", "!<|sep|>"


@pytest.mark.parametrize(
    ("segments", "want"),
    [
        ((C, "response", S), "expected the end of think, received 'response'"),
        ((S,), "does not belong here, in text"),
        ((O, "x", O), "does not belong here, open"),
        ((O, "response", S), "expected text, received the element 'response'"),
        ((C, "think", S, "loose"), "expected an element, received text 'loose'"),
        ((C, "think", S, O, "message", S), "expected think or response or tools, received the element"),
        ((C, "think", S, O, 'tools x="1', S), "received the element"),
        ((C, "think", S, O, "tools", S, O, "call", S, C, "call", S), "expected a call with a tool"),
        (
            (C, "think", S, O, "tools", S, O, 'call tool="f"', S, O, "argument", S, C, "argument", S, C, "call", S),
            "expected an argument with key and type",
        ),
        (
            (C, "think", S, O, "tools", S, O, 'call tool="f"', S, O, 'argument key="k" type="number"', S, "one",
             C, "argument", S, C, "call", S),
            "expected a JSON number, received 'one'",
        ),
        ((C, "think", S, C, "message", S, C, "message", S), "expected the end of the reply"),
    ],
)  # fmt: skip
def test_broken_replies(segments: tuple[str, ...], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        parse_reply(TOKENIZER, ids_of(*segments))


@pytest.mark.parametrize("number", ["9" * 5000, "-1e9999", "0.1"])
def test_numbers_keep_the_text_that_the_model_wrote(number: str) -> None:
    head = (C, "think", S, O, "tools", S, O, 'call tool="f"', S, O, 'argument key="k" type="number"', S)
    reply = parse_reply(TOKENIZER, ids_of(*head, number, C, "argument", S, C, "call", S, C, "tools", S))
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"k": ' + number + "}"
    with pytest.raises(ValueError, match="expected a JSON number, received"):
        parse_reply(TOKENIZER, ids_of(*head, "[" * 50_000, C, "argument", S, C, "call", S))
