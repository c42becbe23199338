"""A Modelfile (https://github.com/ollama/ollama/blob/main/docs/modelfile.md) for a GGUF file beside it.

Ollama has templates of its own kind. The one of a model is found by writing conversations in each way that is
known and comparing with what the model's chat template makes of them: only an exact match is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.models import Tokenizer

__all__ = ["modelfile"]


@dataclass(frozen=True)
class _Style:
    """One way to write a conversation: the pieces around each role's text, and around the reply to come.

    ``begin`` comes first; llama.cpp adds the beginning-of-sequence token itself, so a template must not.
    """

    name: str
    begin: str
    system: tuple[str, str]
    user: tuple[str, str]
    reply: tuple[str, str]

    def write(self, messages: Sequence[Mapping[str, str]], bos: str) -> str:
        """A conversation up to where the next reply begins."""
        around = {"system": self.system, "user": self.user, "assistant": self.reply}
        turns = [f"{around[m['role']][0]}{m['content']}{around[m['role']][1]}" for m in messages]
        return self.begin.replace("{bos}", bos) + "".join(turns) + self.reply[0]

    @property
    def template(self) -> str:
        """The same for Ollama."""
        # without {{- and -}}, which would eat the line breaks of the pieces
        system = _around("{{ .System }}", self.system)
        user = _around("{{ .Content }}", self.user)
        reply = _around("{{ .Content }}", self.reply)
        turns = (
            '{{ range .Messages }}{{ if eq .Role "user" }}' + user
            + '{{ else if eq .Role "assistant" }}' + reply + "{{ end }}{{ end }}" + self.reply[0]
        )  # fmt: skip
        return ("{{ if .System }}" + system + "{{ end }}" if any(self.system) else "") + turns


def _around(text: str, pieces: tuple[str, str]) -> str:
    return pieces[0] + text + pieces[1]


def _llama3(role: str) -> tuple[str, str]:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"


def _chatml(role: str) -> tuple[str, str]:
    return f"<|im_start|>{role}\n", "<|im_end|>\n"


_STYLES = (
    _Style("ChatML", "", _chatml("system"), _chatml("user"), _chatml("assistant")),
    _Style("Llama 3", "{bos}", _llama3("system"), _llama3("user"), _llama3("assistant")),
    _Style(
        "Phi-3",
        "",
        ("<|system|>\n", "<|end|>\n"),
        ("<|user|>\n", "<|end|>\n"),
        ("<|assistant|>\n", "<|end|>\n"),
    ),
    _Style(
        "Gemma",
        "{bos}",
        ("", ""),
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
    ),
)
_SYSTEM = {"role": "system", "content": "You answer briefly."}
_USER = {"role": "user", "content": "How tall is it?"}
_PROBES: tuple[list[dict[str, str]], ...] = (
    [_USER],
    [_USER, {"role": "assistant", "content": "Two metres."}, {"role": "user", "content": "And wide?"}],
)


def modelfile(file: str, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The text of a Modelfile for `file` in the same folder, and notes on what could not be said in it."""
    lines, notes = [f"FROM ./{file}"], []
    found = next((got for style in _STYLES if (got := _fits(style, tokenizer)) is not None), None)
    if found is None:
        notes.append("the Modelfile has no TEMPLATE: the chat template is none that is known; Ollama guesses")
    else:
        style, system = found
        lines.append(f'TEMPLATE """{style.template}"""')
        if system:
            lines.append(f'SYSTEM """{system}"""')
    stops = sorted(filter(None, (tokenizer.text_of(token) for token in tokenizer.stop_ids)))
    lines += [f'PARAMETER stop "{text}"' for text in stops]
    return "\n".join(lines) + "\n", notes


def _fits(style: _Style, tokenizer: Tokenizer) -> tuple[_Style, str] | None:
    """The style and the system message that is assumed, when it writes what the chat template writes."""
    bos = tokenizer.chat.special.get("bos_token", "")
    try:
        plain = [tokenizer.render(probe) for probe in _PROBES]
        system = _assumed(style, plain[0], bos)
        expected = [[{"role": "system", "content": system}, *p] if system else p for p in _PROBES]
        if system is None or plain != [style.write(probe, bos) for probe in expected]:
            return None
        if style.system != ("", ""):
            given = [_SYSTEM, _USER]
            if tokenizer.render(given) != style.write(given, bos):
                return None
    except ModelError:
        return None
    return style, system


def _assumed(style: _Style, text: str, bos: str) -> str | None:
    """The system message that the template writes where none is given; empty: none, None: another style."""
    alone = style.write([_USER], bos)
    if text == alone:
        return ""
    begin = style.begin.replace("{bos}", bos) + style.system[0]
    end = style.system[1] + alone.removeprefix(style.begin.replace("{bos}", bos))
    if style.system[0] and text.startswith(begin) and text.endswith(end) and len(text) > len(begin + end):
        return text[len(begin) : len(text) - len(end)]
    return None
