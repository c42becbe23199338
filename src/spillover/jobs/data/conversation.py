"""Chat messages and tools as rows carry them, checked and brought to the form that templates render.

Three things are normalized, because chat templates do not know the alternatives: a list of text parts
becomes one string, the role ``developer`` becomes ``system``, and the ``arguments`` of a tool call, which
OpenAI writes as a string of JSON, become the object. Keys that are null are dropped.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from spillover.jobs.data.parse import Fault, kind, parse_object, quoted

if TYPE_CHECKING:
    from collections.abc import Collection

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer")
MESSAGE_KEYS = (
    "role",
    "content",
    "weight",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
)


def messages_of(value: object, where: str = "messages") -> list[Message]:
    """Check and normalize a conversation; raises `Fault` naming the field, as in ``messages[2].content``."""
    items = _list(value, where, "messages")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(items)]


def tools_of(value: object, where: str = "tools") -> list[dict[str, Any]]:
    """Check a list of function tools, which the chat template gets as they are."""
    items = _list(value, where, "tools")
    for index, item in enumerate(items):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Fault(f"{where}[{index}] must be an object with function.name")
    return items


def require_known(keys: Collection[str], known: Collection[str], where: str, prefix: str = "") -> None:
    """Raise `Fault` for the first key that is not known, with the known key that it resembles."""
    for key in keys:
        if key not in known:
            hint = resembling(key, known) or f"known keys: {', '.join(known)}"
            raise Fault(f"unknown key {quoted(prefix + key)} in {where}", hint=hint)


def resembling(key: str, known: Collection[str]) -> str | None:
    """A hint with the known key that was probably meant."""
    close = get_close_matches(key[:60], known, 1)
    return f"did you mean {close[0]!r}?" if close else None


def string_of(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Fault(f"{where} must be a string, not {kind(value)}")
    return value


def _list(value: object, where: str, of: str) -> list[Any]:
    if not isinstance(value, list):
        raise Fault(f"{where} must be a list of {of}, not {kind(value)}")
    if not value:
        raise Fault(f"{where} is empty")
    return value


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise Fault(f"{where} must be an object, not {kind(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and isinstance(content, str) and role in ("user", "assistant", "system"):
        return value
    message = {key: item for key, item in value.items() if item is not None}
    require_known(message, MESSAGE_KEYS, where)
    message["role"] = _role(role, where)
    if "content" in message:
        message["content"] = _text(content, f"{where}.content")
    elif role != "assistant" or "tool_calls" not in message:
        raise Fault(f"{where}.content is missing")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in message:
            string_of(message[key], f"{where}.{key}")
    if "weight" in message:
        _require_weight(message["weight"], role, f"{where}.weight")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], role, f"{where}.tool_calls")
    return message


def _role(role: object, where: str) -> str:
    if role is None:
        raise Fault(f"{where}.role is missing")
    if string_of(role, f"{where}.role") not in ROLES:
        raise Fault(f"{where}.role is {quoted(str(role))}", hint=f"roles: {', '.join(ROLES)}")
    return "system" if role == "developer" else str(role)


def _text(content: object, where: str) -> str:
    """The text of a content field; several parts are joined by a line feed, as serving engines do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Fault(f"{where} must be a string or a list of text parts, not {kind(content)}")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise Fault(f"{where}[{index}] must be an object with a type")
        if part["type"] != "text":
            raise Fault(f"{where}[{index}] has the type {quoted(part['type'])}: only text is supported")
        string_of(part.get("text"), f"{where}[{index}].text")
    return "\n".join(part["text"] for part in content)


def _require_weight(weight: object, role: object, where: str) -> None:
    if role != "assistant":
        raise Fault(f"{where} is only for assistant messages", hint="other messages are never trained on")
    if type(weight) is not int or weight not in (0, 1):
        raise Fault(f"{where} must be 0 or 1")


def _tool_calls(value: object, role: object, where: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise Fault(f"{where} is only for assistant messages")
    return [_tool_call(item, f"{where}[{index}]") for index, item in enumerate(_list(value, where, "calls"))]


def _tool_call(value: object, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise Fault(f"{where} must be an object with a function")
    string_of(function.get("name"), f"{where}.function.name")
    return value | {"function": function | {"arguments": _arguments(function.get("arguments"), where)}}


def _arguments(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    text = string_of(value, f"{where}.function.arguments")
    try:
        return parse_object(text.encode()) if text.strip() else {}
    except Fault as fault:
        raise Fault(f"{where}.function.arguments is not a JSON object: {fault.message}") from None
