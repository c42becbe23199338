from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from spillover.engine.torch.weights import Weights


def resident(file: Path) -> int:
    """Bytes that the maps of a file take in this process's memory."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [one for one in maps if one.partition("\n")[0].endswith(f" {file}")]
    assert ours, f"{file} is not mapped"
    return 1024 * sum(int(kib) for one in ours for kib in re.findall(r"^Rss:\s+(\d+)", one, re.M))


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
def test_a_layer_that_was_read_leaves_nothing_of_the_file_in_memory(built):
    model, theirs = built("qwen2")  # whose embedding stays a view of the file
    weights = Weights(model.index(), model.config, torch.float32, torch.device("cpu"))
    file = next(iter(model.index().tensors.values())).file.resolve()
    embedding = theirs.model.embed_tokens.weight
    for number, layer in enumerate(theirs.model.layers):
        assert torch.equal(weights.embedding, embedding)
        assert resident(file) >= embedding.nbytes
        read = weights.layer(number)
        assert resident(file) == 0
        assert torch.equal(read.matrices["down"], layer.mlp.down_proj.weight)
        assert torch.equal(read.input_norm, layer.input_layernorm.weight)
