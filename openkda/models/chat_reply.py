"""From the token ids of a Kimi K3 reply back to an assistant message: the inverse of `openkda.models.chat`.

It reads ids, not text: a marker is a special id, so a reply that quotes `<|close|>` in its answer is no riddle. A reply cut
off by a token limit gives what was complete. `parse_reply` then `chat_segments` gives the same ids again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openkda.models.chat import ANY_JSON, CLOSE, END_OF_MESSAGE, OPEN, SEP

_HEADER = re.compile(r'(\w+)((?: \w+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')
_CHILDREN = {
    "message": ("think", "response", "tools"),
    "tools": ("call",),
    "call": ("argument", "json"),
}  # which elements may stand in which; the others hold text


class ReplyTokenizer(Protocol):
    """What `parse_reply` needs of a tokenizer (`openkda.models.tiktoken_file.TiktokenTokenizer` has it)."""

    def special_id(self, name: str) -> int: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...


@dataclass(frozen=True)
class Reply:
    """message: an assistant message as `chat_segments` takes it. complete: whether the reply closed its message."""

    message: dict[str, Any]
    complete: bool


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    children: list[_Element] = field(default_factory=list)
    closed: bool = False


def parse_reply(tokenizer: ReplyTokenizer, ids: Sequence[int], *, thinking: bool = True) -> Reply:
    """The message of a reply that was generated after `chat_segments(..., thinking=thinking)`.

    ids: what the model produced after the prompt, with or without the final `<|end_of_msg|>`; anything behind it is
    ignored. Tool calls carry their arguments as JSON text. A call that was cut off is left out.
    Raises ValueError, naming expected and received, for ids that follow no reply's grammar.
    """
    first = _Element("think" if thinking else "response")
    root = _Element("message", children=[first])
    stack = [root, first]
    for kind, text in _events(tokenizer, ids):
        if kind == "text":
            _add_text(stack, text)
        elif kind == "open":
            stack.append(_child(stack, text))
        elif not stack or stack[-1].tag != text:
            raise ValueError(f"reply: expected the end of {stack[-1].tag if stack else 'the reply'}, received {text!r}")
        else:
            stack.pop().closed = True
    return Reply(_message(root), root.closed)


def _events(tokenizer: ReplyTokenizer, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    """("open", header), ("close", tag) and ("text", text); a header that was cut off at the end gives nothing."""
    marks = {tokenizer.special_id(name): name for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE)}
    kind, start = "text", 0
    for at, token in enumerate(ids):
        mark = marks.get(token)
        if mark is None:
            continue
        if (mark == SEP) != (kind != "text"):
            raise ValueError(f"reply: token {at}: {mark} does not belong here, {'in text' if kind == 'text' else kind}")
        if at > start:
            yield kind, tokenizer.decode(ids[start:at], special=True)
        if mark == END_OF_MESSAGE:
            return
        kind, start = {OPEN: "open", CLOSE: "close"}.get(mark, "text"), at + 1
    if kind == "text" and start < len(ids):
        yield kind, tokenizer.decode(ids[start:], special=True)


def _add_text(stack: list[_Element], text: str) -> None:
    if not stack or stack[-1].tag in _CHILDREN:
        raise ValueError(f"reply: expected an element, received text {text[:40]!r}")
    stack[-1].text += text


def _child(stack: list[_Element], header: str) -> _Element:
    match = _HEADER.fullmatch(header)
    allowed = _CHILDREN.get(stack[-1].tag, ()) if stack else ()
    if match is None or match[1] not in allowed:
        raise ValueError(f"reply: expected {' or '.join(allowed) or 'text'}, received the element {header[:60]!r}")
    attributes = {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in _ATTRIBUTE.findall(match[2])}
    child = _Element(match[1], attributes)
    stack[-1].children.append(child)
    return child


def _message(root: _Element) -> dict[str, Any]:
    texts = {child.tag: child.text for child in root.children}
    message: dict[str, Any] = {"role": "assistant", "content": texts.get("response", "")}
    if "think" in texts:
        message["reasoning_content"] = texts["think"]
    calls = [call for child in root.children if child.tag == "tools" for call in child.children if call.closed]
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: _Element) -> dict[str, Any]:
    if "tool" not in call.attributes:
        raise ValueError(f"reply: expected a call with a tool, received the attributes {call.attributes}")
    raw = [child.text for child in call.children if child.tag == "json"]
    arguments = raw[0] if raw else "{" + ", ".join(_member(a) for a in call.children) + "}"
    return {"type": "function", "function": {"name": call.attributes["tool"], "arguments": arguments}}


def _member(argument: _Element) -> str:
    """`"key": value` of one argument; all but strings keep the text that the model wrote."""
    if {"key", "type"} - set(argument.attributes):
        raise ValueError(f"reply: expected an argument with key and type, received {argument.attributes}")
    text = argument.text
    if argument.attributes["type"] == "string":
        text = json.dumps(text, ensure_ascii=False)
    else:
        try:
            ANY_JSON.decode(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"reply: expected a JSON {argument.attributes['type']}, received {text[:40]!r}") from error
    return f"{json.dumps(argument.attributes['key'], ensure_ascii=False)}: {text}"
