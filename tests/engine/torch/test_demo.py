"""The gates of the demo model against transformers and PEFT, in float32."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch
import transformers

from data import shared
from engine.tiny import answers, loaded, request
from engine.torch.peer import adapted, micro_batch, tune
from spillover.engine import Optimizer, Work, engine
from spillover.models import LoraConfig, initial, resolve

pytestmark = [pytest.mark.slow, pytest.mark.model]

QUESTIONS = """
What is the capital of Portugal?
How many legs does a spider have?
Why do leaves turn red in autumn?
Write one sentence about the sea.
What is seven times eight?
Name three fruits that are yellow.
Who wrote Romeo and Juliet?
How do bees make honey?
What does a thermometer measure?
Give me a word that rhymes with light.
Is a tomato a fruit or a vegetable?
What language is spoken in Brazil?
How long does it take to boil an egg?
Explain gravity to a child.
What is the opposite of ancient?
Which planet is the largest?
Write a haiku about snow.
How do I remove a coffee stain?
What is the boiling point of water in Fahrenheit?
Name the four seasons.
Why is the ocean salty?
What is a synonym for happy?
Who painted the Mona Lisa?
How many continents are there?
What do pandas eat?
Translate "good morning" into Spanish.
What is photosynthesis?
How do airplanes stay in the air?
Suggest a name for a black cat.
What is the square root of 81?
Where do penguins live?
What is the difference between weather and climate?
Write a polite refusal to an invitation.
How many minutes are in a day?
What causes thunder?
Name a famous bridge.
What is the main ingredient of bread?
Tell me a fact about elephants.
How do you say thank you in French?
What is the chemical symbol for gold?
Why do we yawn?
What is the longest river in Africa?
List two uses of vinegar.
What instrument has 88 keys?
Is glass a liquid or a solid?
What year did people first walk on the moon?
Describe the taste of a lemon.
How does a bicycle stay upright?
What is an adverb?
Which animal is the fastest on land?
""".strip().splitlines()


@pytest.fixture(scope="module")
def demo():
    model = resolve("demo")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager"
    )
    theirs.requires_grad_(False)
    return model, theirs.eval()


def chat(question: str, *more: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, *more]


def test_fifty_greedy_answers_are_transformers_token_for_token(demo):
    model, theirs = demo
    tokenizer = model.tokenizer()
    prompts = sorted((tokenizer.prompt_ids(chat(question)) for question in QUESTIONS), key=len)
    assert len(prompts) == 50
    ours = answers(
        loaded(model, batch=25), [request(str(i), tuple(tokens), 32) for i, tokens in enumerate(prompts)]
    )
    for start in range(0, 50, 25):
        batch = prompts[start : start + 25]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in batch])
        mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in batch])
        full = theirs.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=32, eos_token_id=None, pad_token_id=0
        )
        for row, want in enumerate(full[:, longest:].tolist(), start):
            assert ours[str(row)].tokens == want


def test_a_tune_of_fifty_steps_follows_peft_and_torch_adamw(demo):
    model, theirs = demo
    tokenizer = model.tokenizer()
    config = LoraConfig()
    rates = [1e-4 * min((i + 1) / 3, (1 + math.cos(math.pi * i / 50)) / 2) for i in range(50)]
    with shared("banking77", "train.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if len(row["text"]) < 80][::60][:100]
    pairs = [
        tokenizer.training(chat(row["text"], {"role": "assistant", "content": row["category"]}))
        for row in rows
    ]
    # one user turn, one reply: the targets run from the first to the end
    steps = [
        [micro_batch([ids for ids, _ in two], [mask.index(True) for _, mask in two])]
        for two in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    torch_engine = engine("torch")
    work = Work("train", 2, 128, config, numerics="float32", device="cpu")
    tensors = initial(config, model.config, 0)
    trainer = torch_engine.load(model, torch_engine.plan(model, work)).trainer(config, tensors, Optimizer())
    losses = [trainer.step(batches, lr=rate).loss for batches, rate in zip(steps, rates, strict=True)]
    np.testing.assert_allclose(losses, tune(adapted(theirs, config, tensors), steps, rates), rtol=1e-5)
    assert len(losses) == 50 and np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])
