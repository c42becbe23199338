"""Text to tokens and back, conversations to prompts and to training targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from spillover.errors import ModelError
from spillover.models.chat import ChatTemplate, Message

_UNFINISHED = "\ufffd"  # what decoding puts in the place of an incomplete UTF-8 sequence
_PROBE = "zqxjkv"
LONG_TEXT = 100_000
"""Characters from which on other threads should not wait for a text's tokens."""


class Tokenizer:
    """A model's tokenizer and chat template.

    ``stop_ids`` are the tokens that end a reply: the model's own end-of-sequence ids and the token that its
    chat template writes after an assistant's turn.
    """

    def __init__(self, folder: Path, *, eos_ids: Iterable[int] = ()) -> None:
        """Read ``tokenizer.json`` and the chat template of `folder`; `ModelError` when missing or damaged."""
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(
                f"{path} is missing", hint="get the folder with its fast tokenizer (tokenizer.json)"
            )
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise ModelError(f"{path} is damaged: {error}", hint="get the file again") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.chat = ChatTemplate.read(folder)
        self._eos_ids = tuple(eos_ids)

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's embedding may have more rows, never fewer."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def bos_id(self) -> int | None:
        """The id of the beginning-of-sequence token, or None."""
        return self._special("bos_token")

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the chat template writes right after an assistant's reply, or None."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, _, closing = self.render(messages, generation_prompt=False).rpartition(_PROBE)
        except ModelError:  # no template, or one for other conversations: `eos_ids` end a reply then
            return None
        rest = self._inner.encode(closing, add_special_tokens=False).ids
        return next((token for token in rest if token in self._added), None)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens after which a reply is complete."""
        ids = {*self._eos_ids, self._special("eos_token"), self.end_of_turn}
        return frozenset(token for token in ids if token is not None)

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text: special tokens written in it count, none is added."""
        return list(self._encoded(text, special=False).ids)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text that no template surrounds, with the special tokens that the tokenizer adds."""
        return self._one_bos(list(self._encoded(text, special=True).ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; an incomplete UTF-8 sequence becomes U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """One token as the vocabulary spells it; empty for an id that no token has."""
        return str(self._inner.id_to_token(token) or "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The conversation as the model's chat template writes it; see `ChatTemplate.render`."""
        return self.chat.render(messages, tools=tools, generation_prompt=generation_prompt)

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids up to where the assistant's reply begins. `ModelError` for a doubled beginning token."""
        return self._one_bos(self.encode(self.render(messages, tools=tools)))

    def training(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the whole conversation, and which of them the loss covers.

        The loss covers each assistant reply (unless its ``weight`` is 0) from where `prompt_ids` of the
        messages before ends, through its end-of-turn token; nothing of the other turns. The ids are those of
        one rendering.

        Raises `ModelError` when the template writes the messages before a reply differently once the reply
        follows (the model would be trained on a prompt that it never sees), or writes no end-of-turn token.
        """
        turns = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        text = self.render(turns, tools=tools, generation_prompt=False)
        encoding = self._inner.encode(text, add_special_tokens=False)
        ids, offsets = list(encoding.ids), encoding.offsets
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            prompt = self.render(turns[:turn], tools=tools)
            if not text.startswith(prompt):
                raise ModelError(
                    f"the chat template of {self.chat.source} changes earlier tokens "
                    f"when turn {turn + 1} is added",
                    hint="train on rows with a single reply, or use a model whose template only appends",
                )
            start, stop = self._reply(text, len(prompt), turns[turn].get("content"), ids, offsets)
            mask[start:stop] = [True] * (stop - start)
        return self._one_bos(ids), mask

    def _reply(
        self, text: str, start: int, content: Any, ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """The token range of the reply that begins at character `start`, its end-of-turn token included.

        A token belongs to the reply when it *ends* after `start`: byte-level tokenizers may trim white space
        from offsets.
        """
        closing = self.end_of_turn
        written = content.strip() if isinstance(content, str) else ""
        end = max(text.find(written, start), start) + len(written)
        first = next((i for i, (_, stop) in enumerate(offsets) if stop > start), len(ids))
        last = next((i for i in range(first, len(ids)) if ids[i] == closing and offsets[i][0] >= end), None)
        if closing is None or last is None:
            raise ModelError(
                f"the chat template of {self.chat.source} writes no end-of-turn token after a reply",
                hint="a model tuned with it would not learn to stop; use an instruct model",
            )
        return first, last + 1

    def _encoded(self, text: str, *, special: bool) -> Any:
        """The library's encoding; for one text it holds on to the interpreter, whose other threads wait."""
        if len(text) < LONG_TEXT:
            return self._inner.encode(text, add_special_tokens=special)
        return self._inner.encode_batch([text], add_special_tokens=special)[0]

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            raise ModelError(
                f"the prompt begins with {self.chat.special['bos_token']} twice",
                hint="remove it from the messages: the chat template writes it",
            )
        return ids

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    def _special(self, name: str) -> int | None:
        text = self.chat.special.get(name)
        return None if text is None else self._inner.token_to_id(text)


class StreamDecoder:
    """Decode a growing sequence token by token: the pieces joined equal `Tokenizer.decode` of the whole.

    Two windows are decoded at each step, with and without the new tokens; their difference is the new text.
    It is held back while it ends in an incomplete UTF-8 sequence, so that no piece ever holds half a
    character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became final, which may be empty."""
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._read])
        text = self._tokenizer.decode(self._window)
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        """The text still held back; an incomplete character in it is U+FFFD. The decoder starts anew."""
        before = self._tokenizer.decode(self._window[: self._read])
        text = self._tokenizer.decode(self._window)
        self._window, self._read = [], 0
        return text[len(before) :]
