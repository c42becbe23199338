"""Chat templates: messages to text, exactly as transformers renders them on the day `TODAY`.

The conventions (sandbox, block trimming, the names a template may call) are those documented at
https://huggingface.co/docs/transformers/chat_templating_writing, so that one template gives one text
everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError
from spillover.models.config import read_json

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
TODAY = date(2024, 7, 26)
"""The day that templates are told. A job continued tomorrow must see the same tokens, so it is not today's;
it is the one that Llama 3's own template falls back to."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one model folder, and the special tokens that they may print."""

    def __init__(
        self, templates: Mapping[str, str], special: Mapping[str, str], *, source: Path | str
    ) -> None:
        self.templates = dict(templates)
        self.special = dict(special)
        self.source = source

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """Read ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``, one or several."""
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        named = config.get("chat_template") or {}
        if isinstance(named, str):
            named = {"default": named}
        elif isinstance(named, list):
            named = {entry["name"]: entry["template"] for entry in named}
        file = folder / "chat_template.jinja"
        if file.exists():
            named = {**named, "default": file.read_text(encoding="utf-8")}
        return cls(named, special_tokens(folder, config), source=folder)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The conversation as one text; with `generation_prompt` it ends where the assistant's reply begins.

        Keys whose value is None are dropped, and ``thinking`` or ``reasoning`` of a message are offered as
        ``reasoning_content`` too. Raises `ModelError` when there is no template or the template raises.
        """
        import jinja2

        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        source = self.templates.get(name)
        if source is None:
            raise ModelError(
                f"{self.source} has no chat template",
                hint="use an instruct model, or add chat_template.jinja to its folder",
            )
        try:
            return _compile(source).render(
                messages=[_message(message) for message in messages],
                tools=list(tools) if tools is not None else None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.special,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template of {self.source} is damaged, line {error.lineno}: {error}"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"the chat template of {self.source} refuses the messages: {error}",
                hint="check the roles and their order in the row",
            ) from None


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (``bos_token`` and so on) as text."""
    path = folder / "special_tokens_map.json"
    entries = {**(read_json(path) if path.exists() else {}), **config}
    found = {}
    for name in _NAMED:
        entry = entries.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[name] = text
    return found


def _message(message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for tools that ask; here it prints its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own spelling)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model was trained on it: jinja's own filter escapes ``<`` and ``'`` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
