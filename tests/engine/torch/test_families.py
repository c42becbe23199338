"""Every family against transformers' own model, in float32."""

from __future__ import annotations

import pytest
import torch

from engine.tiny import answers, loaded, prompt, request

LENGTHS = (5, 40, 40, 9, 130, 1)


def theirs_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def test_next_token_logits_are_transformers(family):
    model, theirs = family
    session = loaded(model, batch=len(LENGTHS)).session()
    prompts = [prompt(length, length) for length in LENGTHS]
    logits = session.admit(prompts)
    for row, tokens in enumerate(prompts):
        torch.testing.assert_close(
            torch.from_numpy(logits.numpy(row)), theirs_logits(theirs, tokens)[-1], atol=1e-4, rtol=1e-4
        )


def test_decoded_logits_are_transformers_after_a_slot_was_reused(family):
    model, theirs = family
    session = loaded(model, batch=3).session()
    rows = [list(prompt(length, length)) for length in (50, 12, 33)]
    session.admit(rows)
    session.release(0)
    rows = [rows[2], rows[1]]
    rows.append(list(prompt(6, 1)))
    session.admit(rows[2:])
    for step in range(4):
        added = [step + 1, step + 20, step + 50]
        logits = session.decode(added)
        for row, token in zip(rows, added, strict=True):
            row.append(token)
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(
            torch.from_numpy(logits.numpy(row)), theirs_logits(theirs, tokens)[-1], atol=1e-4, rtol=1e-4
        )


def test_greedy_answers_are_transformers_token_for_token(family):
    model, theirs = family
    prompts = {str(i): prompt(length, i) for i, length in enumerate(LENGTHS)}
    ours = answers(loaded(model), [request(name, tokens, 40) for name, tokens in prompts.items()])
    for name, tokens in prompts.items():
        ids = torch.tensor([tokens])
        full = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert ours[name].tokens == full[0, len(tokens) :].tolist()


def test_scores_are_transformers_log_probabilities(family):
    model, theirs = family
    sequences, starts = [prompt(30, 1), prompt(70, 2)], [1, 40]
    scored = loaded(model).score(sequences, starts, top=3)
    for tokens, start, row in zip(sequences, starts, scored, strict=True):
        want = torch.log_softmax(theirs_logits(theirs, tokens), dim=-1)[start - 1 : -1]
        assert [one.token for one in row] == list(tokens[start:])
        for one, distribution in zip(row, want, strict=True):
            assert one.logprob == pytest.approx(distribution[one.token].item(), abs=1e-4)
            best = distribution.topk(3)
            assert [token for token, _ in one.top] == best.indices.tolist()


def test_bf16_stays_near_float32(llama):
    model, theirs = llama
    logits = loaded(model, numerics="bf16").session().admit([prompt(40)])
    want = theirs_logits(theirs, prompt(40))[-1]
    got = torch.from_numpy(logits.numpy(0))
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.99
