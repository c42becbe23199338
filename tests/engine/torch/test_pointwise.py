"""Norm, rotation and gate, compiled and by torch's operators, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from spillover.engine.torch import pointwise

WAYS = ["compiled", "torch"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Which of the two computes."""
    if request.param == "torch":
        monkeypatch.setattr(pointwise, "kernels", lambda _: None)
    else:
        assert pointwise.kernels(torch.zeros(1)) is not None, "this machine has no compiler"
    return request.param


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def agree(ours, exact, inputs: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal output and gradient of two functions of one tensor, as close as `dtype` allows."""
    mine = inputs.detach().to(dtype, copy=True).requires_grad_()
    whole = inputs.to(dtype).to(torch.float64, copy=True).requires_grad_()
    got, want = ours(mine), exact(whole)
    pull = drawn(*want.shape).to(dtype)
    got.backward(pull)
    want.backward(pull.double())
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 1.2e-5}
    torch.testing.assert_close(got.double(), want, **close)
    torch.testing.assert_close(mine.grad.double(), whole.grad, **close)
    with torch.no_grad():
        # a layer that is computed again must give the same bits
        assert torch.equal(ours(inputs.to(dtype).clone()), got) or pointwise.kernels(inputs) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (7, 20), (5, 3, 33), (40, 576)])
def test_norm(way, shape, dtype):
    weight = 1 + drawn(shape[-1]) / 3

    def exact(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.to(dtype).double()

    agree(lambda x: pointwise.rms_norm(x, weight.to(dtype), 1e-5), exact, drawn(*shape), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, rotated", [(16, 16), (64, 64), (80, 20)])
def test_rotation(way, dim, rotated, dtype):
    angles = drawn(9, rotated // 2)
    cos = angles.cos().repeat(1, 2).unsqueeze(1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1).to(dtype)

    def exact(x):
        low, high = x[:, :4, : rotated // 2], x[:, :4, rotated // 2 : rotated]
        c, s = cos.double()[..., : rotated // 2], sin.double()[..., rotated // 2 :]
        turned = torch.cat((low * c - high * s, high * c + low * s, x[:, :4, rotated:]), -1)
        return torch.cat((turned, x[:, 4:]), 1)

    agree(lambda x: pointwise.rotate(x, cos, sin, 4), exact, drawn(9, 6, dim), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [16, 37, 1536])
def test_gate(way, inner, activation, dtype):
    def exact(x):
        gate, up = x.chunk(2, -1)
        known = torch.nn.functional
        return (known.silu(gate) if activation == "silu" else known.gelu(gate, approximate="tanh")) * up

    agree(lambda x: pointwise.gated(x, activation), exact, 3 * drawn(6, 2 * inner), dtype)


def test_a_gate_far_from_zero_is_open_or_shut(way):
    gate_up = torch.tensor([[-1e6, -200.0, -100.0, 100.0, 200.0, 1e6, 0.0, -90.0] + [2.0] * 8])
    for activation in ("silu", "gelu_tanh"):
        leaf = gate_up.clone().requires_grad_()
        out = pointwise.gated(leaf, activation)
        out.sum().backward()
        assert torch.isfinite(leaf.grad).all()
        torch.testing.assert_close(out[0, :3], torch.zeros(3))
        torch.testing.assert_close(out[0, 3:6], 2 * gate_up[0, 3:6])
