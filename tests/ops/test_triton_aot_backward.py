"""The backward's kernels compiled ahead of time, as `test_triton_aot.py` does with the forward's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from test_triton_aot import Launch, compiled, empty, recorded

STAGES = ("prepare_kernel", "walks_kernel", "products_kernel", "gradients_kernel", "sums_kernel")
ANY = 99 * 1024  # bytes of shared memory a program that the smallest card since Ampere has

# (arguments of `launches`, most spill instructions of each stage that is compiled, shared memory). Measured with Triton 3.6:
# bounded 14 8 38 2 0 (softplus and log decays: gradients up to 36); wide: walks 322 (a state of 256 channels and its operand
# fill the register file); float32: products 0, gradients 31. Above these limits a setting has become wrong.
CASES = {
    "bounded": ({}, dict(zip(STAGES, (24, 16, 40, 40, 0), strict=True)), ANY),
    "wide": ({"size": 256}, {"walks_kernel": 400, "products_kernel": 72}, ANY),
    "float32": ({"dtype": torch.float32}, {"walks_kernel": 0, "products_kernel": 0, "gradients_kernel": 48}, ANY),
    "float32, wide": ({"dtype": torch.float32, "size": 256}, {"walks_kernel": 224, "products_kernel": 0}, ANY),
    "only the final state": ({"output": False}, {"walks_kernel": 0, "products_kernel": 40}, ANY),
    "kept by the forward": ({"keep": True}, {"keep_kernel": 16}, ANY),
    "float32, kept": ({"keep": True, "dtype": torch.float32}, {"keep_kernel": 120}, ANY),
}  # fmt: skip


def launches(
    gate: str | None = "bounded",
    dtype: torch.dtype = torch.bfloat16,
    T: int = 8192,
    size: int = 128,
    group: int = 1,
    packed: bool = False,
    l2norm: bool = True,
    output: bool = True,
    keep: bool = False,
) -> list[Launch]:
    """Of the backward, or with keep of the forward that keeps."""
    from openkda.ops.kda.triton import keep as keeping
    from openkda.ops.kda.triton.backward import backward
    from openkda.ops.kda.triton.launch import Args

    HV, N = 96, 8 if packed else 1
    f32 = {"dtype": torch.float32}
    q, k = (empty(1, T, HV // group, size, dtype=dtype) for _ in "qk")
    v, g, o, do = (empty(1, T, HV, size, dtype=dtype) for _ in range(4))
    A_log, dt_bias = (None, None) if gate is None else (empty(HV, **f32), empty(HV * size, **f32))
    cu = empty(N + 1, dtype=torch.int64) if packed else None
    state = empty(N, HV, size, size, **f32)
    a = Args(
        q, k, v, g, empty(1, T, HV, dtype=dtype), A_log, dt_bias, cu, state, None, None,
        {None: 0, "softplus": 1, "bounded": 2}[gate], -5.0, 0.1, l2norm, True, True, False,
        torch.float32, dtype == torch.float32, False,
    )  # fmt: skip
    with recorded() as found:
        if keep:
            keeping.forward(a, [])
            return found
        grads = backward(a, o, do if output else None, state, True)
    for grad, like in zip(grads, (q, k, v, g, a.beta, A_log, dt_bias, state), strict=True):
        assert (grad is None) == (like is None)
        assert grad is None or like is None or (grad.shape == like.shape and grad.dtype == like.dtype)
    return found


def test_stages_in_order() -> None:
    assert [launch.kernel.__name__ for launch in launches()] == list(STAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_hopper_compiles_within_its_limits(name: str) -> None:
    arguments, limits, shared = CASES[name]
    found = {launch.kernel.__name__: launch for launch in launches(**arguments)}  # type: ignore[arg-type]
    for stage, most in limits.items():
        report = compiled(found[stage], 90)
        where = f"{name}: {stage} {found[stage].options}: {report}"
        assert report.spills <= most, where
        assert report.registers <= 255 and report.shared <= shared, where


# Most spill instructions elsewhere, at 99 KB. Measured with Triton 3.6, capability 8 and 10: walks 8 and 139, products 168
# and 0, everything else at most 34.
ELSEWHERE = {"walks_kernel": 144, "products_kernel": 176}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_other_cards_compile(gate: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings that their generation gets: two pipeline stages of `products` do not compile for capability 10."""
    from openkda.ops.kda.triton import backward

    monkeypatch.setattr(backward, "_generation", lambda device: capability // 10)
    for launch in launches(gate):
        report = compiled(launch, capability)
        where = f"{launch.kernel.__name__} {launch.options}: {report}"
        assert report.spills <= ELSEWHERE.get(launch.kernel.__name__, 40) and report.shared <= ANY, where


def test_lengths_share_one_binary() -> None:
    def keys(found: list[Launch]) -> list[object]:
        sources = [launch.source() for launch in found]
        return [(s.fn.__name__, *(tuple(d.items()) for d in (s.signature, s.constants, s.attrs))) for s in sources]

    for packed in (False, True):
        assert keys(launches(T=8192, packed=packed)) == keys(launches(T=17, packed=packed))
