"""XTML, the chat encoding of Kimi K3: messages in, segments out, and from there token ids.

    <|open|>message role="user"<|sep|>Hello<|close|>message<|sep|><|end_of_msg|>
    <|open|>message role="assistant"<|sep|>
        <|open|>think<|sep|>...<|close|>think<|sep|>
        <|open|>response<|sep|>...<|close|>response<|sep|>
        <|open|>tools<|sep|> call, argument, ... <|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

(Shown on lines; the encoding has no line breaks of its own.) Only the markers are special tokens. Tag names, attributes
and everything a user, a document or a tool wrote are ordinary text, and each is tokenised ALONE: a marker spelled in a
message stays text, and no merge crosses an edge. So a prompt is a list of `Segment`s, never one string.

Source: behaviour of the encoder published with Kimi K3, checked on its recorded segment vectors (tests/models).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]
ImageSize = tuple[int, int]  # (width, height) in pixels

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
)  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
IMAGE_PARTS = ("image", "image_url", "input_image")


class Segment(NamedTuple):
    """One piece of a prompt: a special token by name, or text that can only become ordinary tokens."""

    text: str
    special: bool


class SegmentEncoder(Protocol):
    """What `encode_chat` needs of a tokenizer (`openkda.models.tiktoken_file.TiktokenTokenizer` has it)."""

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]: ...


def encode_chat(tokenizer: SegmentEncoder, messages: Sequence[Message], **options: Any) -> list[int]:
    """Token ids of a conversation; `options` are those of `chat_segments`."""
    return tokenizer.encode_segments(chat_segments(messages, **options))


def chat_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    image_sizes: Sequence[ImageSize] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[Segment]:
    """Segments of a conversation in the field's usual message dictionaries.

    Args:
        messages: `role` (system, user, assistant, tool) and `content` (text, None, or a list of text and image parts);
            optionally `name`; for an assistant `reasoning_content` and `tool_calls`; for a tool `tool_call_id`; for a
            system message `tools` (declared from there on). Tool results that all carry known ids are put into the
            order of their calls and take the calls' names.
        tools: declared before everything else, keys sorted.
        tool_choice: "required" or "none" adds a system message that says so; None or "auto" adds nothing.
        response_format: "json_object", or {"type": "json_schema", "json_schema": {"schema": ...}}.
        thinking: True: every assistant message has a think channel (empty where there is no reasoning) and the
            generation starts in one. False: there is none, and past reasoning is left out.
        thinking_effort: "low", "high" or "max" adds a system message (with thinking only). The published chat
            template passes "max" when its caller names none; the encoder itself, like this function, adds nothing.
        image_sizes: (width, height) of each image part in order, as handed to the image processor, before resizing.
        add_generation_prompt: end with an open assistant message.
        continue_final_message: end within the last message's response, which the model goes on with; it is an assistant's,
            without tool calls, and there is no generation prompt and no system message behind it.
    Raises: ValueError for unknown roles, parts and options, a tool result without a name, tool arguments that are not an
        object, or a number of images that does not match the parts.

    An image placeholder spelled in a message's text stays text: images come only from image parts.
    """
    _check_options(thinking_effort, tool_choice)
    _check_messages(messages)
    if continue_final_message:
        _check_continued(messages, add_generation_prompt, response_format, tool_choice)
    images = iter(image_sizes)
    out: list[Segment] = []
    if tools:
        out += _system("tool-declare", _DECLARE + _json_block(_sorted_keys(tools)))
    if thinking and thinking_effort is not None:
        out += _system("thinking-effort", _EFFORT.format(effort=thinking_effort))
    for message in _with_results_in_call_order(messages):
        out += _message(message, thinking, images)
    if tool_choice in _CHOICE:
        out += _system("tool-choice", _CHOICE[tool_choice])
    if response_format is not None:
        out += _system("response-format", _response_format(response_format))
    if add_generation_prompt:
        out += _open("message", role="assistant") + _open("think" if thinking else "response")
    left = sum(1 for _ in images)
    if left:
        raise ValueError(f"image_sizes: expected one for each image part, received {left} too many")
    return out[: -len(_close("response") + _close("message")) - 1] if continue_final_message else out


def image_segments(size: ImageSize) -> list[Segment]:
    """The prompt of one image; the model puts its features in the place of the single `<|media_pad|>`."""
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"image size: expected width and height of at least 1 pixel, received {size}")
    return [
        Segment(MEDIA_BEGIN, True),
        Segment(f"image {width}x{height}", False),
        *(Segment(marker, True) for marker in (MEDIA_CONTENT, MEDIA_PAD, MEDIA_END)),
    ]


# The wording of the system messages that the format itself adds. Byte-exact on purpose: the model was trained on it.
_DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_DECLARE_MORE = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICE: dict[str | None, str] = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RAW_JSON = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."


ANY_JSON = json.JSONDecoder(parse_int=len, parse_float=len)
"""Tells what is JSON and of which kind; numbers keep their source text, so nobody computes one of a million digits."""


def _check_options(effort: str | None, tool_choice: str | None) -> None:
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"thinking_effort: expected one of {', '.join(EFFORTS)} or None, received {effort!r}")
    if tool_choice not in (None, "auto", *_CHOICE):
        raise ValueError(f"tool_choice: expected 'auto', 'required', 'none' or None, received {tool_choice!r}")


def _check_messages(messages: Sequence[Message]) -> None:
    """TypeError naming the first message that is no dictionary, or whose content or calls are not what they can be."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of dictionaries, received {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {i}: expected a dictionary, received {type(message).__name__}")
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        if content is not None and not isinstance(content, str | list | tuple):
            raise TypeError(
                f"message {i}: content: expected text, None or a list of parts, received {type(content).__name__}"
            )
        for field, items in (("content", parts), ("tool_calls", message.get("tool_calls") or ())):
            if isinstance(items, str | bytes) or not all(isinstance(item, Mapping) for item in items):
                raise TypeError(f"message {i}: {field}: expected a list of dictionaries, received {items!r:.60}")
        texts = [("reasoning", message.get("reasoning_content") or message.get("reasoning"))]
        texts += [("text", part.get("text", part)) for part in parts if part.get("type") == "text"]
        for field, text in texts:
            if text is not None and not isinstance(text, str):
                raise TypeError(f"message {i}: {field}: expected a string, received {text!r:.60}")


def _check_continued(messages: Sequence[Message], prompt: bool, *behind: object) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        got = f"{last.get('role')!r}{' with tool calls' if last.get('tool_calls') else ''}"
        raise ValueError(
            f"continue_final_message: expected an assistant's message without tool calls at the end, received {got}"
        )
    if prompt or any(option not in (None, "auto") for option in behind):
        raise ValueError("continue_final_message: expected no generation prompt, tool_choice or response_format, which would "
                         "stand behind the message")  # fmt: skip


def _open(tag: str, **attributes: object) -> list[Segment]:
    out = [Segment(OPEN, True), Segment(tag, False)]
    for name, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        out += [Segment(f" {name}", False), Segment('="', False), *_text(escaped), Segment('"', False)]
    return [*out, Segment(SEP, True)]


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True)]


def _text(text: str) -> list[Segment]:
    return [Segment(text, False)] if text else []


def _element(tag: str, body: list[Segment], **attributes: object) -> list[Segment]:
    return [*_open(tag, **attributes), *body, *_close(tag)]


def _envelope(body: list[Segment], **attributes: object) -> list[Segment]:
    return [*_element("message", body, **attributes), Segment(END_OF_MESSAGE, True)]


def _system(kind: str, body: str) -> list[Segment]:
    return _envelope(_text(body), role="system", type=kind)


def _message(message: Message, thinking: bool, images: Iterator[ImageSize]) -> list[Segment]:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message role: expected one of {', '.join(ROLES)}, received {role!r}")
    if role == "system" and message.get("tools"):
        return _system("tool-declare", _DECLARE_MORE + _json_block(_sorted_keys(message["tools"])))
    if role == "tool":
        return _envelope(_content(message, images), role="tool", tool=message["tool"], index=message["index"])
    name = {"name": message["name"]} if message.get("name") else {}
    body = _assistant(message, thinking, images) if role == "assistant" else _content(message, images)
    return _envelope(body, role=role, **name)


def _assistant(message: Message, thinking: bool, images: Iterator[ImageSize]) -> list[Segment]:
    out: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        out += _element("think", _text(reasoning))
    out += _element("response", _content(message, images))
    calls = [
        segment
        for index, call in enumerate(message.get("tool_calls") or (), start=1)
        for segment in _element("call", _arguments(_function(call)), tool=_call_name(call), index=index)
    ]
    return out + _element("tools", calls) if calls else out


def _content(message: Message, images: Iterator[ImageSize]) -> list[Segment]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return _text(content)
    out: list[Segment] = []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            out += _text(part["text"] or "")
        elif kind in IMAGE_PARTS:
            size = next(images, None)
            if size is None:
                raise ValueError("image_sizes: expected one for each image part, received too few")
            out += image_segments(size)
        else:
            raise ValueError(f"content part: expected type text or one of {', '.join(IMAGE_PARTS)}, received {kind!r}")
    return out


def _function(call: Message) -> Message:
    return call.get("function") or call


def _call_name(call: Message) -> str:
    name = _function(call).get("name")
    if not name:
        raise ValueError(f"tool call: expected function.name, received {dict(call)}")
    return name


def _arguments(function: Message) -> list[Segment]:
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, Mapping):
        typed = [(k, _kind(v), v if isinstance(v, str) else _json(v)) for k, v in arguments.items()]
    elif isinstance(arguments, str):
        try:
            typed = list(_members(arguments))
        except (json.JSONDecodeError, RecursionError):  # kept for the model to see: history may hold a wrong call
            return _element("json", _text(arguments), type="object")
    else:
        raise ValueError(f"tool arguments: expected an object or its JSON text, received {type(arguments).__name__}")
    return [s for key, kind, text in typed for s in _element("argument", _text(text), key=key, type=kind)]


def _members(source: str) -> Iterator[tuple[str, str, str]]:
    """(key, type, text) of a JSON object's members; all but strings keep their source text, so 1e2 stays 1e2."""
    if not isinstance(ANY_JSON.decode(source), dict):
        raise ValueError(f"tool arguments: expected a JSON object, received {source[:60]!r}")
    at = _skip(source, source.index("{") + 1, "")
    while source[at] != "}":
        key, at = ANY_JSON.raw_decode(source, at)
        start = _skip(source, at, ":")
        value, at = ANY_JSON.raw_decode(source, start)
        yield key, _kind(value), value if isinstance(value, str) else source[start:at]
        at = _skip(source, at, ",")


def _skip(source: str, at: int, mark: str) -> int:
    """Past blanks, at most one `mark`, and blanks; the text is known to be valid JSON."""
    while source[at] in " \t\r\n":
        at += 1
    return _skip(source, at + 1, "") if mark and source[at] == mark else at


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = (
        (bool, "boolean"),
        ((int, float), "number"),
        (str, "string"),
        (Mapping, "object"),
        ((list, tuple), "array"),
    )
    for types, kind in kinds:
        if isinstance(value, types):  # type: ignore[arg-type]
            return kind
    raise ValueError(f"tool argument: expected a JSON value, received {type(value).__name__}")


def _json(value: Any) -> str:
    """As Python's json writes it; the published encoder does so for arguments that arrive as objects."""
    return json.dumps(value, ensure_ascii=False)


def _json_block(value: Any) -> str:
    return "```json\n" + json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n```"


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(v) for v in value] if isinstance(value, list | tuple) else value


def _response_format(wanted: str | Mapping[str, Any]) -> str:
    kind = wanted if isinstance(wanted, str) else wanted.get("type")
    head = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_object":
        return head
    schema = wanted.get("json_schema", {}).get("schema") if isinstance(wanted, Mapping) else None
    if kind != "json_schema" or schema is None:
        raise ValueError(
            "response_format: expected 'json_object' or {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
            f"received {wanted!r}"
        )
    return f"{head}\nThe JSON data must match the following schema:\n{_json_block(schema)}"


def _with_results_in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
    """Every tool message with `tool` and `index` filled in.

    Neighbouring results are sorted by the position of their calls when each names a call of the last assistant
    message; otherwise they stay as they came. The index counts the results since that message, from 1.
    """
    calls: list[Message] = []
    done = 0
    for is_tool, group in groupby(messages, key=lambda m: m.get("role") == "tool"):
        if is_tool:
            for index, (result, name) in enumerate(_named(list(group), calls, done), start=done + 1):
                done = index
                yield {**result, "tool": name, "index": index}
            continue
        for message in group:
            if message.get("role") == "assistant":
                calls, done = list(message.get("tool_calls") or ()), 0
            yield message


def _named(results: list[Message], calls: list[Message], done: int) -> list[tuple[Message, str]]:
    place: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.get("id") is not None:
            place.setdefault(str(call["id"]), position)
    where = [place.get(str(r.get("tool_call_id")), -1) for r in results]
    if min(where) >= 0:
        return [(results[i], _call_name(calls[where[i]])) for i in sorted(range(len(results)), key=where.__getitem__)]
    out = []
    for position, result in enumerate(results, start=done):
        name = result.get("tool") or result.get("name")
        if not name and position >= len(calls):
            raise ValueError(f"tool message: expected a known tool_call_id, or a name; received {dict(result)}")
        out.append((result, name or _call_name(calls[position])))
    return out
