"""Modelfiles: the template is the model's own or none at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.folders import CHATML, LLAMA3, MISTRAL, write_tokenizer
from spillover.export.ollama import modelfile
from spillover.models import Tokenizer

LLAMA = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""  # noqa: E501
SPOKEN = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are Tiny.<|im_end|>\\n' }}{% endif %}",
)


def parse(text: str) -> dict[str, str]:
    """A Modelfile's TEMPLATE and SYSTEM, and its stops in one line."""
    found = dict(re.findall(r'^(TEMPLATE|SYSTEM) """(.*?)"""$', text, re.M | re.S))
    return found | {"stops": " ".join(re.findall(r'^PARAMETER stop "(.*)"$', text, re.M))}


def go(template: str, system: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template makes of the few words that are used here."""
    head, _, rest = template.partition("{{ end }}{{ range .Messages }}") if "{{ if .System" in template else (
        "", "", template.removeprefix("{{ range .Messages }}"))  # fmt: skip
    loop, _, tail = rest.rpartition("{{ end }}{{ end }}")
    user, _, assistant = loop.partition('{{ else if eq .Role "assistant" }}')
    parts = {"user": user.removeprefix('{{ if eq .Role "user" }}'), "assistant": assistant}
    text = head.removeprefix("{{ if .System }}").replace("{{ .System }}", system) if system and head else ""
    text += "".join(parts[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages)
    assert "{{" not in text + tail
    return text + tail


@pytest.mark.parametrize(
    ("template", "system", "stops"),
    [
        (CHATML, "", "<|im_end|>"),
        (SPOKEN, "You are Tiny.", "<|im_end|>"),
        (LLAMA, "", "<|eot_id|> <|im_end|>"),
    ],
)
def test_ollama_writes_what_the_chat_template_writes(
    tmp_path: Path, template: str, system: str, stops: str
) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template))
    text, notes = modelfile("x.gguf", tokenizer)
    assert notes == [] and text.startswith("FROM ./x.gguf\n")
    found = parse(text)
    assert (found.get("SYSTEM", ""), found["stops"]) == (system, stops)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two\n\nlines"},
        {"role": "user", "content": "three"},
    ]
    bos = "<|begin_of_text|>" if template == LLAMA else ""
    assert bos + go(found["TEMPLATE"], system, messages) == tokenizer.render(messages)
    given = [{"role": "system", "content": "Be brief."}, *messages]
    assert bos + go(found["TEMPLATE"], "Be brief.", messages) == tokenizer.render(given)


@pytest.mark.parametrize("template", [MISTRAL, LLAMA3, CHATML.replace("assistant", "model")])
def test_a_template_that_is_not_known_is_left_out_and_said(tmp_path: Path, template: str) -> None:
    text, notes = modelfile("x.gguf", Tokenizer(write_tokenizer(tmp_path, template)))
    assert "TEMPLATE" not in text and "PARAMETER stop" in text
    assert len(notes) == 1 and "the Modelfile has no TEMPLATE" in notes[0]
