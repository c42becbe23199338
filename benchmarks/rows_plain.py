"""The script that `spill run` is compared with: rows of a file through `transformers.generate`, in batches.

    rows_plain.py MODEL FILE OUT BATCH DTYPE

Rows are sorted by the tokens they ask for and by length, so that few are wasted on padding. It writes the
answers at the end, and prints the seconds that generating took and the tokens it gave, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers


def main() -> None:
    model_path, file, out, batch, dtype = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    with open(file) as lines:
        rows = [json.loads(line) for line in lines]
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    order = sorted(range(len(rows)), key=lambda at: (rows[at]["max_tokens"], len(prompts[at])))
    answers, tokens, start = [""] * len(rows), 0, time.perf_counter()
    for first in range(0, len(order), int(batch)):
        places = order[first : first + int(batch)]
        inputs = tokenizer.pad({"input_ids": [prompts[at] for at in places]}, return_tensors="pt")
        most = rows[places[-1]]["max_tokens"]
        with torch.inference_mode():
            made = model.generate(
                **inputs, do_sample=False, max_new_tokens=most, pad_token_id=tokenizer.pad_token_id
            )
        for at, ids in zip(places, made[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ids = ids[: rows[at]["max_tokens"]]
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids
            answers[at], tokens = tokenizer.decode(ids, skip_special_tokens=True), tokens + len(ids)
    seconds = time.perf_counter() - start
    with open(out, "w") as results:
        results.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
