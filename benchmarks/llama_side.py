"""llama.cpp on a GGUF file, for `export_parity.py` and the tests: how it cuts text, and what it would say.

Through the C functions of llama-cpp-python; it answers one JSON request a line, see `peer.Process`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import llama_cpp as c
import numpy as np


class Calls:
    """What may be asked."""

    def __init__(self) -> None:
        c.llama_backend_init()
        # whatever it says while loading is for people who debug it
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, ctypes.c_void_p(0))

    def open(self, path: str, length: int) -> dict[str, int]:
        """Load a file for sequences of up to `length` tokens; what it says of itself."""
        self._model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        settings = c.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = length
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = c.GGML_TYPE_F32
        settings.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = c.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"llama.cpp makes no context of {length} tokens for {path}")
        self._words = c.llama_model_get_vocab(self._model)
        return {
            "eos": c.llama_vocab_eos(self._words),
            "bos": c.llama_vocab_bos(self._words),
            "eot": c.llama_vocab_eot(self._words),
            "add_bos": bool(c.llama_vocab_get_add_bos(self._words)),
            "context": c.llama_model_n_ctx_train(self._model),
        }

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Each text as tokens: special ones that are written in it count, none is added."""
        found = []
        for text in texts:
            data = text.encode()
            room = (c.llama_token * (len(data) + 8))()
            count = c.llama_tokenize(self._words, data, len(data), room, len(room), False, True)
            found.append(room[:count])
        return found

    def template(self) -> str:
        """The chat template in the file."""
        return (c.llama_model_chat_template(self._model, None) or b"").decode()

    def score(self, prompt: list[int], reply: list[int]) -> list[list[float]]:
        """For each token of `reply`: the most likely one, and the log-probability of the given one."""
        logits = self._logits([*prompt, *reply])[len(prompt) - 1 : -1].astype(np.float64)
        peak = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
        given = logits[np.arange(len(reply)), reply] - total
        return [[int(best), float(one)] for best, one in zip(logits.argmax(axis=1), given, strict=True)]

    def _logits(self, ids: list[int]) -> np.ndarray:
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        batch = c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        failed = c.llama_decode(self._context, batch)
        c.llama_batch_free(batch)
        if failed:
            raise ValueError(f"llama_decode failed: {failed}")
        size = c.llama_vocab_n_tokens(self._words)
        logits = c.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(ids), size)).copy()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    calls = Calls()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(calls, request.pop("call"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
