"""Files and batches: durable, in the formats of the OpenAI API, and the same answers as `spill run`."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from jobs.scenarios import run_job
from served import Running, ask, batch_file, eventually
from spillover.serve import uploads

GREEDY = {"temperature": 0.0, "logprobs": True}


@pytest.fixture
def name(tiny: Path) -> str:
    return str(tiny)


def begin(server: Running, path: Path, **more) -> openai.types.Batch:
    with path.open("rb") as data:
        file = server.client.files.create(file=data, purpose="batch")
    return server.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **more
    )


def ended(server: Running, batch: openai.types.Batch) -> openai.types.Batch:
    found = [batch]

    def over() -> bool:
        found[0] = server.client.batches.retrieve(batch.id)
        return found[0].status in ("completed", "failed", "cancelled")

    eventually(over)
    return found[0]


def after(server: Running, batch: openai.types.Batch, rows: int) -> None:
    """Return once so many more rows of a batch are done."""
    before = server.client.batches.retrieve(batch.id).request_counts.completed
    eventually(lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= before + rows)


def lines(server: Running, file: str | None) -> list[dict]:
    assert file is not None
    return [json.loads(line) for line in server.client.files.content(file).text.splitlines()]


def said(rows: list[dict]) -> dict[str, list[int]]:
    """What rows were answered, token by token."""
    return {
        row["custom_id"]: [
            one["token_id"] for one in row["response"]["body"]["choices"][0]["logprobs"]["content"]
        ]
        for row in rows
    }


def test_a_batch_is_a_run_of_its_file(server, tiny, tmp_path, monkeypatch):
    """The same answers in the same order, whichever adapter it is for; sampled ones too."""
    name = f"{tiny}+a"
    body = {"temperature": 1.0, "seed": 4, "logprobs": True}
    path = batch_file(tmp_path / "prompts.jsonl", 60, name, **body)
    batch = ended(server, begin(server, path, metadata={"for": "a test"}))
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"for": "a test"}, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed, batch.error_file_id) == (60, 60, 0, None)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    rows = lines(server, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"q{n}" for n in range(60)]
    assert rows[0]["response"]["body"]["model"] == name
    monkeypatch.setenv("SPILL_HOME", str(server.home))
    result, _ = run_job(tmp_path, Path(name), batch=8)
    assert said(rows) == said([json.loads(line) for line in result.run.results.read_text().splitlines()])
    one = server.client.chat.completions.create(
        model=name, messages=ask("Number 13, the capital of France"), max_tokens=9, temperature=1.0, seed=4,
        extra_body={"custom_id": "q13", "return_token_ids": True},
    )  # fmt: skip
    assert one.choices[0].token_ids == said(rows)["q13"]


def test_rows_that_do_not_fit_go_to_a_file_of_their_own(server, tiny, tmp_path):
    path = batch_file(tmp_path / "rows.jsonl", 3)
    with path.open("a") as file:
        body = {"messages": ask("x"), "max_tokens": 9000}
        file.write(json.dumps({"custom_id": "long", "body": body}) + "\n")
    batch = ended(server, begin(server, path))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
    assert len(lines(server, batch.output_file_id)) == 3
    (error,) = lines(server, batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("long", "context_length_exceeded")


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        (['{"custom_id": "a", "body": {}}'], 1, "body.messages is missing"),
        (['{"body": {"messages": [{"role": "user", "content": "x"}], "model": "gpt"}}'], 1, "no model 'gpt'"),
        (['{"prompt": "x"}'], 1, "no requests of a batch"),
        (['{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}]}}'] * 2, 2, "already"),
        (["{"], 1, "ends before"),
        (["\n"], 1, "no rows"),
    ],
)
def test_a_file_that_cannot_be_answered_fails_its_batch(server, tmp_path, rows, line, says):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    batch = ended(server, begin(server, path))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    (problem,) = batch.errors.data
    assert problem.line == line
    assert says in problem.message
    assert str(tmp_path) not in problem.message and "state" not in problem.message


def test_a_batch_is_for_one_model(server, tiny, tmp_path):
    path = batch_file(tmp_path / "rows.jsonl", 2, f"{tiny}+a")
    other = batch_file(tmp_path / "other.jsonl", 3, f"{tiny}+b").read_text().splitlines()[2]
    path.write_text(path.read_text() + other + "\n")
    batch = ended(server, begin(server, path))
    assert (batch.status, batch.errors.data[0].line) == ("failed", 3)


def test_files(server, tmp_path):
    client, content = server.client, b'{"a": 1}\n' * 1000
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (9000, "rows.jsonl", "batch", "file")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}}, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "file is missing"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "is empty"),
        ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, "multipart"),
        ({"content": b"{}", "headers": {"Content-Type": "multipart/form-data"}}, "cannot be read"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=y"}}, ""),
    ],
)
def test_uploads_that_are_none(server, form, says):
    answer = httpx2.post(f"{server.url}/files", timeout=60, **form)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_uploads_have_a_limit(server):
    """What is sent beyond it is refused, and nothing of it is kept."""
    before = len(server.client.files.list().data)

    def pieces():
        yield b'--y\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range((uploads.FILE_BYTES >> 20) + 1):
            yield bytes(1 << 20)

    answer = httpx2.post(
        f"{server.url}/files", content=pieces(), timeout=60,
        headers={"Content-Type": "multipart/form-data; boundary=y"},
    )  # fmt: skip
    assert answer.status_code == 413
    assert len(server.client.files.list().data) == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"completion_window": 5}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"mood": "good"}, "mood"),
    ],
)
def test_batches_that_are_none(server, body, param):
    file = server.client.files.create(file=("rows.jsonl", b"x"), purpose="batch")
    good = {"endpoint": "/v1/chat/completions", "input_file_id": file.id, "completion_window": "24h"}
    answer = server.post("/batches", good | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_lists_have_pages(server, tmp_path):
    made = [begin(server, batch_file(tmp_path / f"{n}.jsonl", 1)) for n in range(3)]
    listed = [batch.id for batch in server.client.batches.list(limit=2)]  # the client turns the pages
    assert {batch.id for batch in made} <= {*listed}
    assert len(listed) == len({*listed})
    assert httpx2.get(f"{server.url}/batches?limit=0").status_code == 400
    assert httpx2.get(f"{server.url}/batches?after=batch_none").status_code == 400
    for batch in made:
        ended(server, batch)


def test_a_batch_that_is_cancelled_keeps_what_it_has(server, tiny, tmp_path):
    path = batch_file(tmp_path / "rows.jsonl", 400, max_completion_tokens=None, **GREEDY)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["body"]["max_tokens"] = 5 if number < 40 else 8000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = begin(server, path)
    eventually(lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= 40)
    with pytest.raises(openai.ConflictError):
        server.client.files.delete(batch.input_file_id)
    assert server.client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(server, batch)
    assert batch.status == "cancelled"
    done = lines(server, batch.output_file_id)
    assert 40 <= len(done) == batch.request_counts.completed < 400
    assert server.client.batches.cancel(batch.id).status == "cancelled"  # nothing happens
    eventually(server.idle)


def test_somebody_who_waits_goes_before_a_batch(server, tiny, tmp_path):
    """A batch has all slots; one answer comes at once, and the batch is what it would have been."""
    path = batch_file(tmp_path / "rows.jsonl", 60, max_completion_tokens=None, **GREEDY)
    path.write_text("".join(line.replace('"max_tokens": ', '"max_tokens": 20') + "\n"
                            for line in path.read_text().splitlines()))  # fmt: skip
    alone = said(lines(server, ended(server, begin(server, path)).output_file_id))
    assert len(alone["q3"]) == 206
    batch = begin(server, path)
    eventually(lambda: server.figures()["spill_serve_running_rows"] == 8)
    for _ in range(3):
        server.client.chat.completions.create(model=str(tiny), messages=ask("x"), max_tokens=3)
    assert server.client.batches.retrieve(batch.id).status == "in_progress"
    assert said(lines(server, ended(server, batch).output_file_id)) == alone


@pytest.mark.slow
def test_a_killed_server_continues_its_batches(serving, name, tmp_path):
    """SIGKILL in the middle, twice, then SIGTERM: every row is there, once, as if nothing had been."""
    whole = batch_file(tmp_path / "rows.jsonl", 300, **GREEDY)
    whole.write_text(whole.read_text().replace('"max_tokens": ', '"max_tokens": 10'))
    server = serving("--batch", "8")
    first, second = begin(server, whole), begin(server, whole)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        after(server, first, 50)
        assert server.stop(number) == (0 if number == signal.SIGTERM else -number)
        kept = json.loads((tmp_path / "state" / "batches" / first.id / "batch.json").read_text())
        assert kept["status"] == "in_progress"
        server = serving("--batch", "8")
    outputs = []
    for batch in (first, second):
        batch = ended(server, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
        rows = lines(server, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [f"q{n}" for n in range(300)]
        outputs.append(said(rows))
    assert outputs[0] == outputs[1]
    left = sorted(path.name for path in (tmp_path / "state" / "batches" / first.id).iterdir())
    assert left == ["batch.json"]


def test_a_batch_waits_for_a_server_of_its_model(serving, tiny, name, tmp_path):
    path = batch_file(tmp_path / "rows.jsonl", 2000, f"{tiny}+a", **GREEDY)
    server = serving(model=f"{tiny}+a")
    batch = begin(server, path)
    eventually(lambda: server.client.batches.retrieve(batch.id).status == "in_progress")
    server.kill()
    other = serving()
    eventually(lambda: f"{batch.id} waits for another start: it is for {tiny}+a" in other.log.read_text())
    assert other.client.batches.retrieve(batch.id).status == "in_progress"
    assert other.client.batches.cancel(batch.id).status == "cancelling"


@pytest.mark.parametrize("model", ['["x"]', "7", '{"a": 1}'])
def test_a_row_whose_model_is_no_name_fails_its_batch_and_no_other(server, tiny, tmp_path, model):
    bad = tmp_path / "bad.jsonl"
    body = f'{{"model": {model}, "messages": [{{"role": "user", "content": "Rome"}}]}}'
    bad.write_text(f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n')
    failed = ended(server, begin(server, bad))
    assert failed.status == "failed" and failed.errors.data[0].line == 1
    assert str(server.home.parent / "shared") not in failed.errors.data[0].message
    path = batch_file(tmp_path / "good.jsonl", 3, str(tiny), **GREEDY)
    assert ended(server, begin(server, path)).status == "completed"


def test_a_row_without_a_model_is_for_the_base(server, tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    body = {"model": None, "messages": [{"role": "user", "content": "Rome"}], "max_tokens": 3}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path.write_text(json.dumps(row) + "\n")
    batch = ended(server, begin(server, path))
    assert batch.status == "completed", batch.errors


def test_a_conversation_that_the_template_refuses_is_that_rows_error(server, tiny, tmp_path, monkeypatch):
    path = batch_file(tmp_path / "rows.jsonl", 4, str(tiny), **GREEDY)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows[1]["body"]["messages"] = [
        {"role": "user", "content": "Rome"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "f", "tool_call_id": "1"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = ended(server, begin(server, path))
    counts = batch.request_counts
    if counts.failed == 0:
        pytest.fail("the tiny model's template takes this conversation: choose another")
    assert (batch.status, counts.completed, counts.failed) == ("completed", 3, 1)
    (error,) = lines(server, batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("q1", "invalid_messages")
    assert [row["custom_id"] for row in lines(server, batch.output_file_id)] == ["q0", "q2", "q3"]


def test_a_batch_continues_under_other_settings(serving, name, tmp_path):
    """With the most tokens of an answer that held when it was accepted."""
    path = batch_file(tmp_path / "rows.jsonl", 120, name, max_tokens=None, temperature=0.0)
    server = serving("--batch", "4", "--max-tokens", "9")
    batch = begin(server, path)
    after(server, batch, 5)
    assert server.stop() == 0
    server = serving("--batch", "4", "--max-tokens", "3")
    found = ended(server, batch)
    assert (found.status, found.request_counts.completed) == ("completed", 120), found.errors
    bodies = [row["response"]["body"] for row in lines(server, found.output_file_id)]
    assert max(body["usage"]["completion_tokens"] for body in bodies) == 9


def test_a_file_that_a_batch_reads_cannot_be_deleted_however_close(server, tiny, tmp_path):
    """A batch and a deletion at once: either the batch is refused, or the file stays."""
    path = batch_file(tmp_path / "rows.jsonl", 2, str(tiny), **GREEDY)
    window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with ThreadPoolExecutor(2) as pool, server.client as client:
        for _ in range(15):
            with path.open("rb") as data:
                file = client.files.create(file=data, purpose="batch")
            begun = pool.submit(client.batches.create, input_file_id=file.id, **window)
            deleted = pool.submit(client.files.delete, file.id)
            if begun.exception() is None:
                assert deleted.exception() is not None
                assert ended(server, begun.result()).status == "completed"


@pytest.mark.parametrize("limit", ["0" * 8 + "1" + "9" * 5000, "٣", "0", "10001", "-1", ""])
def test_a_limit_that_is_none_is_refused(server, limit):
    for what in ("files", "batches"):
        assert httpx2.get(f"{server.url}/{what}", params={"limit": limit}).status_code == 400


def test_a_range_is_not_understood_and_does_no_harm(server, tiny, tmp_path):
    path = batch_file(tmp_path / "rows.jsonl", 1, str(tiny), **GREEDY)
    with path.open("rb") as data:
        file = server.client.files.create(file=data, purpose="batch")
    for wanted in ("bytes=x", "bytes=99-", "items=0-1"):
        answer = httpx2.get(f"{server.url}/files/{file.id}/content", headers={"Range": wanted})
        assert answer.status_code == 200 and answer.content == path.read_bytes()
