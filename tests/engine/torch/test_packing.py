from __future__ import annotations

import pytest
import torch

from spillover.engine.torch.packing import pack, whole


def test_few_different_lengths_and_little_padding():
    rounded = [whole(length) for length in range(1, 5000)]
    assert all(length <= wide for length, wide in enumerate(rounded, 1))
    assert all(wide % 16 == 0 for wide in rounded)
    assert all(wide - length <= max(15, length / 16) for length, wide in enumerate(rounded, 1))
    assert len(set(rounded)) < 90
    assert rounded == sorted(rounded)


def test_a_stream_is_padded_once_at_its_end():
    stream = pack([[5, 6, 7], [8]], torch.device("cpu"))
    assert stream.tokens.tolist() == [5, 6, 7, 8] + [0] * 12
    assert stream.positions.tolist() == [0, 1, 2, 0, *range(12)]
    assert stream.lengths == [3, 1, 12]


@pytest.mark.parametrize("length", [16, 496, 512, 1024])
def test_a_whole_length_is_kept(length):
    assert whole(length) == length
