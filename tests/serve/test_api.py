"""What a client of the OpenAI API gets: answers, whole and streamed, and the same ones as `spill run`."""

from __future__ import annotations

import json
import threading

import httpx2
import pytest

from jobs.scenarios import run_job, write_prompts
from served import Running, ask, eventually

SAMPLED = {"temperature": 1.0, "seed": 7}
IDS = {"return_token_ids": True}


@pytest.fixture
def name(server: Running) -> str:
    return server.model.partition("+")[0]


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running):
    yield
    eventually(server.idle, "rows are left")


def test_models_are_the_base_and_every_adapter(server, name):
    listed = [model.id for model in server.client.models.list()]
    assert listed == [name, f"{name}+a", f"{name}+b"]
    assert server.client.models.retrieve(f"{name}+b").id == f"{name}+b"


@pytest.mark.parametrize("decoding", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}])
def test_answers_are_those_of_a_run(server, name, tiny, tmp_path, monkeypatch, decoding):
    """Token for token, greedy and sampled, through both endpoints."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    write_prompts(tmp_path / "prompts.jsonl", 6)
    result, _ = run_job(tmp_path, tiny, logprobs=0, **decoding)
    rows = [json.loads(line) for line in result.run.results.read_text().splitlines()]
    given = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    for row, prompt in zip(rows, given, strict=True):
        choice = row["response"]["body"]["choices"][0]
        answer = server.client.chat.completions.create(
            model=name, messages=ask(prompt["prompt"]), max_tokens=prompt["max_tokens"], **decoding,
            extra_body=IDS | {"custom_id": row["custom_id"]},
        ).choices[0]  # fmt: skip
        assert answer.token_ids == [one["token_id"] for one in choice["logprobs"]["content"]]
        assert answer.message.content == choice["message"]["content"]
        assert answer.finish_reason == choice["finish_reason"]
        again = server.client.completions.create(
            model=name, prompt=answer.prompt_token_ids, max_tokens=prompt["max_tokens"], **decoding,
            extra_body=IDS | {"custom_id": row["custom_id"]},
        ).choices[0]  # fmt: skip
        assert again.token_ids == answer.token_ids


def test_a_list_of_prompts_is_the_rows_of_a_file(server, name, tiny, tmp_path, monkeypatch):
    """Without an id the random numbers are those of row-000001, row-000002, ...; samples as in a run."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    prompts = ["the capital", "of France", "is Rome"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    result, _ = run_job(tmp_path, tiny, logprobs=0, samples=2, max_tokens=9, temperature=1.0, seed=3)
    wanted = [
        [one["token_id"] for one in choice["logprobs"]["content"]]
        for line in result.run.results.read_text().splitlines()
        for choice in json.loads(line)["response"]["body"]["choices"]
    ]
    ids = [
        server.client.chat.completions.create(
            model=name, messages=ask(prompt), max_tokens=1, extra_body=IDS
        ).choices[0].prompt_token_ids
        for prompt in prompts
    ]  # fmt: skip
    answer = server.client.completions.create(
        model=name, prompt=ids, max_tokens=9, n=2, temperature=1.0, seed=3, extra_body=IDS
    )
    assert [choice.token_ids for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_strings_are_tokenized_as_they_are(server, name):
    client = server.client
    one = client.completions.create(
        model=name, prompt="the capital", max_tokens=5, temperature=0, extra_body=IDS
    ).choices[0]
    same = client.completions.create(
        model=name, prompt=[one.prompt_token_ids], max_tokens=5, temperature=0
    ).choices[0]
    assert same.text == one.text
    assert "".join(client.completions.create(
        model=name, prompt=["the capital", "of"], max_tokens=5, temperature=0
    ).choices[0].text) == one.text  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_says_what_the_whole_says(server, name, seed):
    """Random tokens: most are parts of characters, and no piece ever has half a one."""
    asked = {
        "model": name, "messages": ask("Hello"), "max_tokens": 120, "seed": seed, "n": 2,
        "logprobs": True, "top_logprobs": 2, "extra_body": IDS,
    }  # fmt: skip
    whole = server.client.chat.completions.create(**asked)
    texts, ids, logprobs, ends = ["", ""], [[], []], [[], []], {}
    usage = None
    stream = server.client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        (choice,) = chunk.choices
        piece = choice.delta.content or ""
        texts[choice.index] += piece
        ids[choice.index] += getattr(choice, "token_ids", None) or []
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    for number, choice in enumerate(whole.choices):
        assert texts[number] == choice.message.content
        assert ids[number] == choice.token_ids
        assert [(one.token, one.logprob) for one in logprobs[number]] == [
            (one.token, one.logprob) for one in choice.logprobs.content
        ]
        assert all(len(one.top_logprobs) == 2 for one in logprobs[number])
        assert ends[number] == choice.finish_reason
    assert usage == whole.usage


def test_pieces_of_a_stream_are_whole_characters(server, name):
    stream = server.client.completions.create(
        model=name, prompt="🙂", max_tokens=400, temperature=1.0, seed=1, stream=True
    )
    shown = [chunk.choices[0].text for chunk in stream]
    whole = server.client.completions.create(model=name, prompt="🙂", max_tokens=400, temperature=1.0, seed=1)
    assert "".join(shown) == whole.choices[0].text
    assert len(shown) > 20


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_stop_strings_end_answers_and_never_show(server, name, kind):
    def create(**more):
        given = {"model": name, "max_tokens": 60, "seed": 2, **more}
        if kind == "chat":
            return server.client.chat.completions.create(messages=ask("Hello"), **given)
        return server.client.completions.create(prompt="Hello", **given)

    def text(choice):
        return choice.message.content if kind == "chat" else choice.text

    free = text(create().choices[0])
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    done = create(stop=[stop, "never there"]).choices[0]
    assert text(done) == free[: free.index(stop)]
    assert done.finish_reason == "stop"
    shown, finish = "", None
    for chunk in create(stop=stop, stream=True):
        choice = chunk.choices[0]
        shown += (choice.delta.content or "") if kind == "chat" else choice.text
        assert free.startswith(shown) and len(shown) <= free.index(stop)
        finish = choice.finish_reason or finish
    assert (shown, finish) == (text(done), "stop")


def test_completions_have_logprobs_in_columns(server, name):
    choice = server.client.completions.create(
        model=name, prompt="Hello", max_tokens=4, logprobs=3, seed=1, extra_body=IDS
    ).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.token_ids) == 4
    assert [len(top) <= 3 for top in choice.logprobs.top_logprobs] == [True] * 4
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_adapters_answer_by_name_in_the_same_passes(server, name):
    """What each says alone, it says among the others."""

    def say(model: str) -> list[int]:
        return server.client.completions.create(
            model=model, prompt="the capital of", max_tokens=40, temperature=0, extra_body=IDS
        ).choices[0].token_ids  # fmt: skip

    names = [name, f"{name}+a", f"{name}+b"]
    alone = {model: say(model) for model in names}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: together.update({n: say(names[n % 3])})) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {n: alone[names[n % 3]] for n in range(12)}


def test_without_a_seed_answers_differ(server, name):
    texts = {
        server.client.completions.create(model=name, prompt="Hello", max_tokens=20).choices[0].text
        for _ in range(4)
    }
    assert len(texts) == 4


def test_extensions_of_sampling_count(server, name):
    greedy = server.client.completions.create(model=name, prompt="Hi", max_tokens=12, temperature=0)
    for extra in ({"top_k": 1}, {"min_p": 0.999}):
        same = server.client.completions.create(model=name, prompt="Hi", max_tokens=12, extra_body=extra)
        assert same.choices[0].text == greedy.choices[0].text


def test_health_and_metrics(server, name):
    assert httpx2.get(f"{server.root}/health").text == "ok\n"
    before = server.figures()
    server.client.completions.create(model=name, prompt="Hello", max_tokens=11, temperature=0, stop=["\0"])
    after = server.figures()
    assert (
        1 <= after["spill_serve_generated_tokens_total"] - before["spill_serve_generated_tokens_total"] <= 11
    )
    assert after["spill_serve_slots"] == 8
    text = httpx2.get(f"{server.root}/metrics").text
    assert 'spill_serve_requests_total{path="/v1/completions",status="200"}' in text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/chat/completions", {"model": "other"}, 404, "model"),
        ("/chat/completions", {"model": 7}, 400, "model"),
        ("/chat/completions", {"model": None}, 400, "model"),
        ("/chat/completions", {"messages": None}, 400, "messages"),
        ("/chat/completions", {"messages": "hello"}, 400, "messages"),
        ("/chat/completions", {"messages": []}, 400, "messages"),
        ("/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
        ("/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
        ("/chat/completions", {"messages": ask("word " * 9000)}, 400, "messages"),
        ("/chat/completions", {"max_tokens": 8190}, 400, "messages"),
        ("/chat/completions", {"max_tokens": 0}, 400, "max_tokens"),
        ("/chat/completions", {"max_completion_tokens": "many"}, 400, "max_completion_tokens"),
        ("/chat/completions", {"temperature": -1}, 400, "temperature"),
        ("/chat/completions", {"temperature": "hot"}, 400, "temperature"),
        ("/chat/completions", {"top_p": 0}, 400, "top_p"),
        ("/chat/completions", {"top_p": 1.5}, 400, "top_p"),
        ("/chat/completions", {"top_k": -1}, 400, "top_k"),
        ("/chat/completions", {"min_p": 1}, 400, "min_p"),
        ("/chat/completions", {"seed": 1.5}, 400, "seed"),
        ("/chat/completions", {"stop": [""]}, 400, "stop"),
        ("/chat/completions", {"stop": 3}, 400, "stop"),
        ("/chat/completions", {"n": 0}, 400, "n"),
        ("/chat/completions", {"n": 129}, 400, "n"),
        ("/chat/completions", {"n": True}, 400, "n"),
        ("/chat/completions", {"stream": "yes"}, 400, "stream"),
        ("/chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/chat/completions", {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options"),
        ("/chat/completions", {"logprobs": 3}, 400, "logprobs"),
        ("/chat/completions", {"top_logprobs": 3}, 400, "top_logprobs"),
        ("/chat/completions", {"logprobs": True, "top_logprobs": 65}, 400, "top_logprobs"),
        ("/chat/completions", {"tools": [{"type": "function"}]}, 400, "tools"),
        ("/chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("/chat/completions", {"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("/chat/completions", {"temprature": 1}, 400, "temprature"),
        ("/chat/completions", {"custom_id": ""}, 400, "custom_id"),
        ("/completions", {"prompt": None}, 400, "prompt"),
        ("/completions", {"prompt": ""}, 400, "prompt"),
        ("/completions", {"prompt": []}, 400, "prompt"),
        ("/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/completions", {"prompt": [10**30]}, 400, "prompt"),
        ("/completions", {"prompt": [[1], []]}, 400, "prompt"),
        ("/completions", {"prompt": ["a"] * 1025}, 400, "prompt"),
        ("/completions", {"prompt": ["a"] * 1000}, 400, "n"),
        ("/completions", {"prompt": [5] * 8192}, 400, "prompt"),
        ("/completions", {"echo": True}, 400, "echo"),
        ("/completions", {"suffix": "x"}, 400, "suffix"),
        ("/completions", {"best_of": 3}, 400, "best_of"),
        ("/completions", {"logprobs": True}, 400, "logprobs"),
        ("/completions", {"logprobs": 65}, 400, "logprobs"),
        ("/completions", {"messages": ask("x")}, 400, "messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, name, path, body, status, param):
    good = {"model": name} | ({"messages": ask("x")} if path.startswith("/chat") else {"prompt": "x"})
    answer = server.post(path, good | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"model": NaN}', b"\xff\xfe{", b'{"a":1,"a":2}', b"[" * 5000,
     b'{"a":"\\ud800"}'],
)  # fmt: skip
def test_garbage_is_refused_in_one_line(server, data):
    answer = server.post("/chat/completions", data)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]


def test_a_context_that_does_not_do_has_its_code(server, name):
    answer = server.post("/completions", {"model": name, "prompt": [5] * 8192})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    fits = server.client.completions.create(model=name, prompt=[5] * 8191, temperature=0)
    assert fits.usage.completion_tokens == 1  # what is left of the context bounds an answer that does not say


def test_unknown_places(server):
    for path in (
        "/v1/embeddings",
        "/",
        "/v2/models",
        "/v1/models/other",
        "/v1/files/file-x",
        "/v1/batches/x",
    ):
        answer = httpx2.get(f"{server.root}{path}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]
    assert httpx2.get(f"{server.url}/chat/completions").status_code == 405


def test_bodies_have_a_limit(server):
    answer = server.post("/completions", b" " * (17 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_tools_reach_the_template(serving, home, tmp_path):
    from models.folders import LLAMA3, tiny_llama, write_tokenizer

    folder = tiny_llama(tmp_path / "tools")
    write_tokenizer(folder, LLAMA3)
    server = serving(model=str(folder))
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    sizes = [
        server.client.chat.completions.create(
            model=str(folder), messages=ask("x"), max_tokens=1, **more
        ).usage.prompt_tokens
        for more in ({}, {"tools": tools})
    ]
    assert sizes[1] > sizes[0] + 10
