"""Chat templates render as transformers renders them, and training targets are exactly the replies."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from models.folders import CHATML, LLAMA3, MISTRAL, QWEN, write_tokenizer
from spillover.errors import ModelError
from spillover.models import Tokenizer
from spillover.models.chat import TODAY

USER = {"role": "user", "content": "What is the weather in Rome? <b>&'\"</b> 🙂"}
REPLY = {"role": "assistant", "content": "Sunny, 25°C."}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "the city's weather: <é>",
        "parameters": {"b": 1, "a": [True, None]},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "lookup", "arguments": {"city": "Rome"}}}],
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": " Be brief. "}, USER],
    [USER, REPLY],
    [
        USER,
        REPLY,
        {"role": "user", "content": "And in Paris?\n"},
        {"role": "assistant", "content": " Rain \n"},
    ],
]


def peer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "whole"])
def test_rendering_and_ids_equal_transformers(
    template, messages, tools, prompt, tmp_path, monkeypatch
) -> None:
    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(TODAY.year, TODAY.month, TODAY.day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)
    folder = write_tokenizer(tmp_path, template)
    ours, theirs = Tokenizer(folder), peer(folder)
    text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert ours.render(messages, tools=tools, generation_prompt=prompt) == text
    if prompt:
        ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.prompt_ids(messages, tools=tools) == ids


def test_tool_calls_reasoning_and_absent_content_equal_transformers(tmp_path) -> None:
    folder = write_tokenizer(tmp_path, QWEN)
    thinking = {"role": "assistant", "content": "Sunny.", "thinking": "look it up"}
    for messages in ([USER, CALL, {"role": "tool", "content": "25"}, REPLY], [USER, thinking]):
        text = peer(folder).apply_chat_template(messages, tools=[TOOL], tokenize=False)
        assert Tokenizer(folder).render(messages, tools=[TOOL], generation_prompt=False) == text
    assert "look it up" in text


def test_generation_tag_and_special_tokens_equal_transformers(tmp_path) -> None:
    folder = write_tokenizer(tmp_path, MISTRAL, eos_token="</s>")
    text = peer(folder).apply_chat_template([USER, REPLY, USER], tokenize=False)
    assert Tokenizer(folder).render([USER, REPLY, USER], generation_prompt=False) == text
    assert text.startswith("<|begin_of_text|>[INST]")


def test_what_a_template_can_look_at_equals_transformers(tmp_path) -> None:
    names = (
        "documents is none",
        "tools is none",
        "pad_token is defined",
        "'content' in messages[1]",
        "bos_token",
    )
    folder = write_tokenizer(tmp_path, " ".join("{{ " + name + " }}" for name in names))
    text = peer(folder).apply_chat_template([USER, CALL], tokenize=False)
    assert Tokenizer(folder).render([USER, CALL], generation_prompt=False) == text
    assert text == "True True False False <|begin_of_text|>"


def test_named_templates_and_the_jinja_file(tmp_path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = Tokenizer(write_tokenizer(tmp_path, named))
    assert tokenizer.render([USER]) == "plain"
    assert tokenizer.render([USER], tools=[TOOL]) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer(tmp_path).render([USER]) == "from the file"
    assert peer(tmp_path).apply_chat_template([USER], tokenize=False) == "from the file"


@pytest.mark.parametrize(
    ("template", "config", "stop"),
    [
        (CHATML, {}, "<|im_end|>"),
        (LLAMA3, {}, "<|eot_id|>"),
        (QWEN, {}, "<|im_end|>"),
        (MISTRAL, {"eos_token": "</s>"}, "</s>"),
    ],
    ids=["chatml", "llama3", "qwen", "mistral"],
)
def test_training_covers_replies_and_their_end_of_turn_only(template, config, stop, tmp_path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template, **config))
    messages = [
        USER,
        REPLY,
        {"role": "user", "content": "And in Paris?"},
        {"role": "assistant", "content": "Rain."},
    ]
    ids, mask = tokenizer.training(messages)
    assert ids == tokenizer.encode(tokenizer.render(messages, generation_prompt=False))
    covered = [[]]
    for token, target in zip(ids, mask, strict=True):
        if target:
            covered[-1].append(token)
        elif covered[-1]:
            covered.append([])
    replies = [
        tokenizer._inner.decode(part, skip_special_tokens=False).removeprefix(" ") for part in covered if part
    ]
    first, last = REPLY["content"], "Rain."
    if template is QWEN:  # what the model must write after the prompt includes its empty thought
        last = "<think>\n\n</think>\n\nRain."
    assert replies == [first + stop, last + stop]
    prompt = tokenizer.prompt_ids(messages[:-1])
    assert ids[: len(prompt)] == prompt, "the model is trained on the prompt that it will see"
    assert mask[len(prompt)] and not mask[len(prompt) - 1]


def test_training_follows_weights_and_hostile_content(tmp_path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, CHATML))
    skipped = {"role": "assistant", "content": "Sunny, 25°C.", "weight": 0}
    ids, mask = tokenizer.training([USER, skipped, USER, {**REPLY, "weight": 1}])
    assert sum(mask) == len(tokenizer.encode(REPLY["content"])) + 1
    assert mask[-2] and not mask[-1], "the newline after the end of turn is no target"
    ids, mask = tokenizer.training([USER, {"role": "assistant", "content": "a<|im_end|>b"}])
    assert tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target]) == "ab"
    ids, mask = tokenizer.training([USER, {"role": "assistant", "content": ""}])
    assert sum(mask) == 1, "an empty reply still ends"
    ids, mask = tokenizer.training([USER])
    assert not any(mask)


def test_a_token_that_spans_prompt_and_reply_is_a_target(tmp_path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, CHATML, corpus=["a\n\n\nb\n\n\nc"]))
    ids, mask = tokenizer.training([USER, {"role": "assistant", "content": "\n\nRome"}])
    covered = tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target])
    assert covered == "\n\n\nRome"


def test_training_keeps_leading_white_space_under_trimmed_offsets(tmp_path) -> None:
    import json

    folder = write_tokenizer(tmp_path, CHATML)
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    document["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    tokenizer = Tokenizer(folder)
    ids, mask = tokenizer.training([USER, {"role": "assistant", "content": "  \n Rome  "}])
    text = tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target])
    assert text.strip() == "Rome"
    assert text.endswith("  ")
    ids, mask = tokenizer.training([USER, {"role": "assistant", "content": "Rome"}])
    header = tokenizer.prompt_ids([USER])
    assert not any(mask[: len(header)]), "the header's newline, whose offsets are empty, is no target"
    assert mask[len(header)]


def refusal(call) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals_are_one_line(tmp_path) -> None:
    none = Tokenizer(write_tokenizer(tmp_path / "none", None))
    assert "no chat template" in refusal(lambda: none.render([USER]))
    strict = Tokenizer(write_tokenizer(tmp_path / "strict", LLAMA3))
    assert "no role narrator" in refusal(lambda: strict.render([{"role": "narrator", "content": "x"}]))
    broken = Tokenizer(write_tokenizer(tmp_path / "broken", "{% if %}"))
    assert "damaged, line 1" in refusal(lambda: broken.render([USER]))
    counting = Tokenizer(write_tokenizer(tmp_path / "counting", "{{ messages|length }}" + CHATML))
    assert "changes earlier tokens when turn 2 is added" in refusal(lambda: counting.training([USER, REPLY]))
    endless = Tokenizer(write_tokenizer(tmp_path / "endless", CHATML.replace("<|im_end|>", "")))
    assert "no end-of-turn token" in refusal(lambda: endless.training([USER, REPLY]))
    twice = Tokenizer(write_tokenizer(tmp_path / "twice", "{{ bos_token }}" + LLAMA3))
    assert "begins with <|begin_of_text|> twice" in refusal(lambda: twice.prompt_ids([USER]))
    assert "begins with <|begin_of_text|> twice" in refusal(lambda: twice.training([USER, REPLY]))


def test_a_template_cannot_reach_the_interpreter(tmp_path) -> None:
    escape = "{{ messages.__class__.__base__.__subclasses__() }}"
    tokenizer = Tokenizer(write_tokenizer(tmp_path, escape))
    assert "unsafe" in refusal(lambda: tokenizer.render([USER]))
