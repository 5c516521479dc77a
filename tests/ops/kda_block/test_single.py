"""One token on a CPU: the block written out equals the composition of its ops, and its short check the long one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from openkda.ops.kda.api import BoundedGate, SoftplusGate
from openkda.ops.kda_block import reference, single
from openkda.ops.kda_block.call import BlockCall, BlockState, BlockWeights
from openkda.ops.kda_block.checks import check_state, check_tokens, is_usual
from openkda.testing.compare import rel

F32 = torch.float32


def call(
    N: int = 2, H: int = 2, HV: int = 4, K: int = 16, V: int = 8, W: int = 4, dtype: Any = F32, gate: str = "bounded"
) -> BlockCall:
    g = torch.Generator().manual_seed(N + HV + W)
    wide = torch.promote_types(dtype, F32)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    A_log, dt_bias = draw(HV, dtype=wide), draw(HV * K, dtype=wide)
    channels = (H * K, H * K, HV * V)
    return BlockCall(
        draw(N, 1, H * K), draw(N, 1, H * K), draw(N, 1, HV * V), draw(N, 1, HV, K), draw(N, 1, HV), draw(N, 1, HV, V),
        BlockWeights(*(draw(n, W, dtype=wide) for n in channels), draw(V, dtype=wide), 1e-5),
        BlockState(draw(N, HV, K, V, dtype=wide), *(draw(N, n, W - 1) for n in channels)),
        None, BoundedGate(-5.0, A_log, dt_bias) if gate == "bounded" else SoftplusGate(A_log, dt_bias), K**-0.5, False,
    )  # fmt: skip


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "limit"),
    [
        ({}, torch.float64, 1e-13), ({"N": 1, "H": 4}, F32, 2e-6), ({"HV": 2, "W": 2}, F32, 2e-6),
        ({"W": 3, "V": 32}, torch.bfloat16, 1e-2), ({"H": 4}, torch.float16, 2e-3),
    ],
)  # fmt: skip
@torch.no_grad()
def test_equals_the_composition(sizes: dict[str, int], dtype: torch.dtype, limit: float, gate: str) -> None:
    c = call(**sizes, dtype=dtype, gate=gate)
    before = [t.clone() for t in c.state.tensors()]
    got, want = single.step(c), reference._compose(c)
    assert got is not None and got.state is not None and want.state is not None
    assert all(torch.equal(a, b) for a, b in zip(before, c.state.tensors(), strict=True)), "the old state stays"
    for a, b in zip((got.output, *got.state.tensors()), (want.output, *want.state.tensors()), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and rel(a, b) < limit
    # And from its own state, whose windows lie in memory another way.
    again = [r(dataclasses.replace(c, state=s.state)) for r, s in ((single.step, got), (reference._compose, want))]
    assert rel(again[0].output, again[1].output) < 2 * limit


@torch.no_grad()
def test_rows_whose_squares_overflow_take_the_long_way() -> None:
    c = call(N=1)
    c.q = torch.full_like(c.q, 1e20)
    assert single.step(c) is None
    assert torch.isfinite(reference.run(c).output).all()


@torch.no_grad()
def test_16_bit_windows_under_autocast() -> None:
    c = call()
    want = reference.run(c).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.run(c).output, want)


def wrong(c: BlockCall) -> dict[str, BlockCall]:
    """Calls with one thing wrong each."""
    out = {}
    for name in ("q", "k", "v", "g", "beta", "out_gate"):
        t = getattr(c, name)
        for how, bad in (
            ("shape", t[..., :-1]),
            ("dtype", t.int()),
            ("rows", t[:1]),
            ("type", None),
            ("device", t.to("meta")),
        ):
            out[f"{name} {how}"] = dataclasses.replace(c, **{name: bad})
    for part in ("weights", "state"):
        group = getattr(c, part)
        for field in dataclasses.fields(group):
            t = getattr(group, field.name)
            if isinstance(t, torch.Tensor):
                for how, bad in (("shape", t[..., :-1]), ("device", t.to("meta"))):
                    out[f"{part}.{field.name} {how}"] = dataclasses.replace(
                        c, **{part: dataclasses.replace(group, **{field.name: bad})}
                    )
                if part == "state":
                    bad = dataclasses.replace(group, **{field.name: t.half()})
                    out[f"state.{field.name} dtype"] = dataclasses.replace(c, state=bad)
    out["no channels"] = dataclasses.replace(c, g=c.g[..., :0])
    out["a state without axes"] = dataclasses.replace(
        c, state=dataclasses.replace(c.state, recurrent=torch.tensor(0.0))
    )
    out["a window without axes"] = dataclasses.replace(
        c, weights=dataclasses.replace(c.weights, conv_q=torch.tensor(0.0))
    )
    out["gate"] = dataclasses.replace(c, gate=None)
    out["A_log"] = dataclasses.replace(c, gate=BoundedGate(-5.0, torch.zeros(3)))
    out["softplus without A_log"] = dataclasses.replace(c, gate=SoftplusGate(None))  # type: ignore[arg-type]
    out["16-bit A_log"] = dataclasses.replace(c, gate=BoundedGate(-5.0, torch.zeros(4).half()))
    out["dt_bias turned"] = dataclasses.replace(c, gate=BoundedGate(-5.0, None, torch.zeros(16, 4)))
    for scale in (float("nan"), float("inf"), torch.tensor(2.0), "2"):
        out[f"scale {scale}"] = dataclasses.replace(c, scale=scale)
    for eps in (float("nan"), -1.0, torch.tensor(1e-5), None):
        out[f"norm_eps {eps}"] = dataclasses.replace(c, weights=dataclasses.replace(c.weights, norm_eps=eps))
    for name in ("conv_q", "norm"):
        ints = dataclasses.replace(c.weights, **{name: getattr(c.weights, name).int()})
        out[f"integer {name}"] = dataclasses.replace(c, weights=ints)
    out["tokens"] = dataclasses.replace(
        c, **{n: getattr(c, n)[:, :0] for n in ("q", "k", "v", "g", "beta", "out_gate")}
    )
    return out


def test_the_short_check_passes_nothing_that_the_long_one_refuses() -> None:
    c = call()
    assert is_usual(c)
    check_tokens(c)
    check_state(c)
    for name, bad in wrong(c).items():
        assert not is_usual(bad), name
        with pytest.raises((ValueError, TypeError), match="expected"):
            check_tokens(bad)
            check_state(bad)
