from __future__ import annotations

import dataclasses
import itertools

import pytest

from engine.tiny import answers, loaded, prompt, request
from spillover.engine import Sampling, Scheduler
from spillover.errors import InputError

HOT = Sampling(temperature=1.0, top_p=0.95, seed=3)


def mixed(count: int):
    """Rows of many lengths, half greedy, half sampled."""
    return [
        request(f"row-{i}", prompt(3 + 7 * i % 40, i), 4 + 5 * i % 23, sampling=HOT if i % 2 else Sampling())
        for i in range(count)
    ]


def test_rows_do_not_depend_on_their_batch_mates(llama):
    rows = mixed(24)
    alone = answers(loaded(llama[0], batch=1), rows)
    together = answers(loaded(llama[0], batch=16), rows)
    assert {i: done.tokens for i, done in alone.items()} == {i: done.tokens for i, done in together.items()}
    assert len({tuple(done.tokens) for done in alone.values()}) == 24


def test_slots_are_reused_and_every_row_is_answered_in_full(llama):
    done = answers(loaded(llama[0], batch=3), mixed(20))
    assert {i: len(one.tokens) for i, one in done.items()} == {row.id: row.max_tokens for row in mixed(20)}
    assert {one.finish for one in done.values()} == {"length"}


def test_requests_are_pulled_as_slots_free_up(llama):
    pulled = itertools.count()
    rows = (next(pulled) is None or row for row in mixed(30))
    running = Scheduler(loaded(llama[0], batch=4)).run(rows)
    next(running)
    assert next(pulled) <= 5


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_stopped_run_continues_as_if_it_never_stopped(llama, sampling):
    model = loaded(llama[0], batch=4)
    rows = [request(f"r{i}", prompt(5 + i, i), 25, sampling=sampling, logprobs=2) for i in range(6)]
    whole = answers(model, rows)
    asked = itertools.count()
    scheduler = Scheduler(model, should_stop=lambda: next(asked) >= 9)
    assert list(scheduler.run(iter(rows))) == []
    partials = scheduler.partials()
    assert {name: len(tokens) for name, tokens in partials.items()} == {f"r{i}": 9 for i in range(4)}
    resumed = answers(
        model, [request(r.id, r.tokens, 25, sampling=sampling, logprobs=2,
                        generated=tuple(partials.get(r.id, ()))) for r in rows]
    )  # fmt: skip
    for name, done in whole.items():
        assert resumed[name].tokens == done.tokens
        for a, b in zip(resumed[name].logprobs, done.logprobs, strict=True):
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_rows_finished_together_stay_in_partials_until_they_are_taken(llama):
    scheduler = Scheduler(loaded(llama[0], batch=4))
    running = scheduler.run(request(f"r{i}", prompt(4, i), 3) for i in range(4))
    first = next(running)
    left = scheduler.partials()
    assert {first.id, *left} == {f"r{i}" for i in range(4)}
    assert {len(tokens) for tokens in left.values()} == {3}


def test_a_complete_partial_is_answered_without_computing(llama):
    model = loaded(llama[0])
    tokens = answers(model, [request("a", prompt(5), 6)])["a"].tokens
    scheduler = Scheduler(model)
    (done,) = scheduler.run([request("a", prompt(5), 6, generated=tuple(tokens))])
    assert (done.tokens, done.finish, scheduler.prefilled) == (tokens, "length", 0)


def test_a_stop_id_ends_one_row_and_not_its_mates(llama):
    model = loaded(llama[0])
    free = answers(model, [request("a", prompt(5), 12), request("b", prompt(9), 12)])
    stop = free["a"].tokens[4]
    end = free["a"].tokens.index(stop)
    done = answers(
        model, [request("a", prompt(5), 12, stop_ids=frozenset([stop])), request("b", prompt(9), 12)]
    )
    assert done["a"].tokens == free["a"].tokens[: end + 1]
    assert (done["a"].finish, done["b"].tokens) == ("stop", free["b"].tokens)


def test_a_stop_string_is_found_across_tokens(llama):
    class Letters:
        def push(self, token_id: int) -> str:
            return f"{token_id},"

    model = loaded(llama[0])
    tokens = answers(model, [request("a", prompt(5), 12)])["a"].tokens
    text = f",{tokens[6]},{tokens[7]}"
    done = answers(model, [request("a", prompt(5), 12, stop=(text,))], stream=Letters)["a"]
    assert (done.tokens, done.finish) == (tokens[:8], "stop")


def test_logprobs_are_those_of_the_chosen_tokens(llama):
    model = loaded(llama[0])
    done = answers(model, [request("a", prompt(7), 10, logprobs=64, sampling=HOT)])["a"]
    (scored,) = model.score([(*prompt(7), *done.tokens)], [7], top=64)
    assert len(done.logprobs) == 10
    for made, again in zip(done.logprobs, scored, strict=True):
        assert made.token == again.token
        assert made.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert len(made.top) == 64
        assert [p for _, p in made.top] == sorted((p for _, p in made.top), reverse=True)
    assert any(made.token != made.top[0][0] for made in done.logprobs)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (request("x", (), 5), "row x has an empty prompt"),
        (request("x", (1,), 0), "row x asks for 0 tokens"),
        (request("x", prompt(60), 5), "row x: a prompt of 60 tokens .* the context of 64"),
    ],
    ids=["empty", "zero", "long"],
)
def test_rows_that_cannot_be_answered_are_named(llama, row, says):
    with pytest.raises(InputError, match=says):
        answers(loaded(llama[0], sequence=64), [row])


def test_a_withdrawn_row_continues_elsewhere_and_its_mates_do_not_notice(llama):
    """Withdrawn between passes, submitted again with its tokens: everybody says what they would have."""
    model = loaded(llama[0], batch=3)
    rows = [request(f"r{i}", prompt(5 + i, i), 20, sampling=HOT) for i in range(5)]
    whole = answers(model, rows)
    asked, back = itertools.count(), []

    def between() -> bool:
        if next(asked) == 7:
            assert scheduler.running == 3
            back.append(scheduler.withdraw("r1"))
            assert scheduler.withdraw("r1") is None
        return False

    scheduler = Scheduler(model, should_stop=between)
    done = {one.id: one.tokens for one in scheduler.run(rows)}
    assert done == {name: one.tokens for name, one in whole.items() if name != "r1"}
    assert back == [whole["r1"].tokens[:7]]
    again = answers(model, [request("r1", rows[1].tokens, 20, sampling=HOT, generated=tuple(back[0]))])
    assert again["r1"].tokens == whole["r1"].tokens


def test_what_waits_for_memory_can_be_withdrawn(llama):
    model = loaded(llama[0], batch=4)
    model.plan = dataclasses.replace(model.plan, pass_tokens=40)
    rows = [request("a", prompt(30), 3), request("b", prompt(30, 1), 3), request("c", prompt(5), 3)]
    held = []

    def between() -> bool:
        if scheduler.held is not None:
            held.append(scheduler.held.id)
            assert scheduler.withdraw("b") == []
        return False

    scheduler = Scheduler(model, should_stop=between)
    assert {one.id for one in scheduler.run(rows)} == {"a", "c"}
    assert held == ["b"]


def test_tokens_are_told_as_they_come(llama):
    heard: dict[str, list[int]] = {}
    scores: dict[str, list] = {}

    def told(row, token, logprob) -> None:
        heard.setdefault(row.id, []).append(token)
        scores.setdefault(row.id, []).append(logprob)

    rows = [request("a", prompt(5), 9, logprobs=2), request("b", prompt(7), 4)]
    done = answers(loaded(llama[0]), rows, told=told)
    assert heard == {name: one.tokens for name, one in done.items()}
    assert scores == {"a": done["a"].logprobs, "b": [None] * 4}


def test_draws_take_the_place_of_the_id(llama):
    model = loaded(llama[0])
    one = answers(model, [request("row", prompt(5), 12, sampling=HOT)])["row"]
    rows = [request("x", prompt(5), 12, sampling=HOT, draws="row"), request("y", prompt(5), 12, sampling=HOT)]
    other = answers(model, rows)
    assert other["x"].tokens == one.tokens != other["y"].tokens


def test_a_source_that_had_nothing_is_asked_again(llama):
    """As long as there are rows, before each pass: rows join while others run."""

    class Later:
        def __init__(self) -> None:
            self.asked = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.asked += 1
            if self.asked in (1, 6):
                return request(f"r{self.asked}", prompt(5, self.asked), 12)
            raise StopIteration

    done = [one.id for one in Scheduler(loaded(llama[0])).run(Later())]
    assert done == ["r1", "r6"]
