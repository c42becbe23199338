"""``spill export`` as it is typed."""

from __future__ import annotations

import json

from cli.command import tree


def test_an_export_is_told_in_lines_or_as_json_and_runs(shell):
    outcome = shell("export", "tiny", "--to", "out", "--tokens", "2")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{shell.folder}/out: safetensors, bf16, ")
    assert (
        "agrees with the trained model on" in lines[1]
        and "of 57 answers, near ties left out on 1" in lines[1]
    )
    assert lines[-1] == f"next: spill run {shell.folder}/out sample"
    before = tree(shell.folder)
    again = shell("export", "tiny", "--to", "out")
    assert (again.code, tree(shell.folder)) == (1, before)
    assert again.err == "spill: out exists already. Try: choose another --to, or add --overwrite\n"
    outcome = shell("export", "tiny", "--to", "tiny.gguf", "--tokens", "2", "--json", "--ollama")
    assert (outcome.code, outcome.err) == (0, "")
    record = json.loads(outcome.out)
    assert (record["format"], record["type"], record["parity"]["same_prompts"]) == ("gguf", "bf16", 57)
    assert {"tiny.gguf", "tiny.Modelfile", "tiny.export.json"} <= {
        path.name for path in shell.folder.iterdir()
    }
    run = shell("run", "out", "prompts.jsonl", "--stop-after", "2", "--numerics", "float32")
    assert run.code == 0
