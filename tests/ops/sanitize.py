"""Every kernel once, on the smallest shapes that reach all of its branches, for compute-sanitizer (not collected by pytest).

export PYTORCH_NO_CUDA_MEMORY_CACHING=1       # every tensor an allocation of its own: one byte too far is seen
python tests/ops/sanitize.py                  # fills Triton's cache, so that the tool watches kernels, not compilers
compute-sanitizer --tool memcheck  --error-exitcode 1 python tests/ops/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/ops/sanitize.py
"""

from __future__ import annotations

from functools import partial

import torch

from openkda import BoundedGate, kda, kda_step
from openkda.ops.kda.hopper import launch
from openkda.ops.kda_block import hopper as one_token
from openkda.ops.kda_block.api import BlockState, BlockWeights, kda_block, kda_block_commit
from openkda.ops.kda_block.call import CALLS
from openkda.ops.norm.api import gated_rms_norm, rms_norm
from openkda.ops.short_conv.api import short_conv, short_conv_step
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients

BF16 = torch.bfloat16
draw = partial(torch.randn, device="cuda")


def report(name: str, *tensors: torch.Tensor | None) -> None:
    torch.cuda.synchronize()
    assert all(bool(t.isfinite().all()) for t in tensors if t is not None), name
    print(name, flush=True)


def inputs(gate: str | None, **sizes: object) -> KDAInputs:
    x = make_inputs(1, gate=gate, use_qk_l2norm=True, use_beta_sigmoid=True, **sizes)  # type: ignore[arg-type]
    return x.to(dtype=BF16, device="cuda")


def main() -> None:
    packs = (0, 1, 17, 64, 70)
    for gate in ("bounded", "softplus"):
        for sizes in ({"T": 70, "H": 2, "K": 128}, {"lengths": packs, "H": 1, "HV": 2, "K": 24, "V": 40}):
            found = gradients(inputs(gate, **sizes), impl="triton")
            report(f"triton forward and backward, {gate} {sizes}", *found.values())
        for lengths, recompute in (((130,), None), (packs, None), (packs, False)):
            x = inputs(gate, lengths=lengths, H=2, K=128)
            found = gradients(x, impl="hopper", recompute=recompute)
            report(f"hopper forward and backward, {gate} {lengths}, recompute {recompute}", *found.values())
    x = inputs("bounded", T=70, H=1, K=64)
    with torch.no_grad():
        report("triton_exact", kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), impl="triton_exact").output)
        for lengths in ((130,), packs):
            x = inputs("bounded", lengths=lengths, H=2, HV=4, K=128)
            for schedule in ("fused", "two_pass", ("segments", 2)):
                if schedule[0] == "segments" and len(lengths) > 1:
                    continue
                cu = x.options["cu_seqlens"].int() if len(lengths) > 1 else None
                report(
                    f"hopper {schedule} {lengths}",
                    *launch.forward(
                        x.q, x.k, x.v, x.g, x.beta, x.gate.A_log, x.gate.dt_bias, scale=0.1, lower_bound=-5.0,
                        initial_state=x.initial_state, final_state=True, cu_seqlens=cu, schedule=schedule,
                    ),
                )  # fmt: skip
        H, K, W, rows = 2, 128, 4, 3
        weights = BlockWeights(*(draw(H * K, W) for _ in "qkv"), draw(K), 1e-5)
        state = BlockState(draw(rows, H, K, K), *(draw(rows, H * K, W - 1).to(BF16) for _ in "qkv"))
        slots = torch.tensor([2, -1, 0], device="cuda")
        for T, keep, one_token.FEW in ((1, "last", 132), (1, "last", 0), (5, "last", 132), (3, "all", 132)):
            tokens = {n: draw(rows, T, H * K).to(BF16) for n in "qkv"}
            tokens |= {n: draw(rows, T, H, K).to(BF16) for n in ("g", "out_gate")}
            out = kda_block(
                **tokens, beta=draw(rows, T, H).to(BF16), weights=weights, state=state, slots=slots,
                gate=BoundedGate(-5.0), keep=keep,
            )  # fmt: skip
            report(f"decoding block, {T} tokens, keep {keep}, few {one_token.FEW}", out.output)
            CALLS.forget()
            if out.states is not None:
                counts = torch.tensor([2, 1, 3], device="cuda")
                kda_block_commit(out.states, *(tokens[n] for n in "qkv"), counts, state=state, slots=slots)
                report("commit", *state.tensors())
        for sizes in ({"T": 1, "H": 2, "K": 128}, {"T": 1, "H": 1, "HV": 2, "K": 24, "V": 40}):
            x = inputs("softplus", B=3, **sizes)
            rows = [t[:, 0] for t in (x.q, x.k, x.v, x.g, x.beta)]
            report("kda_step", *kda_step(*rows, x.initial_state, gate=x.gate, state_indices=slots))
        x, at = inputs("softplus", lengths=packs, H=2, K=24), torch.tensor([0, 17, 18, 150], device="cuda")
        report("states at positions", *kda(x.q, x.k, x.v, x.g, x.beta, **x.kwargs(), state_positions=at))
        report("one convolved token", *short_conv_step(draw(3, 40), draw(40, 4), draw(3, 40, 3)))
    for sizes, cu in (((2, 37, 48), None), ((1, 40, 130), torch.tensor([0, 0, 1, 3, 40], device="cuda"))):
        y, w = draw(*sizes).to(BF16).requires_grad_(), draw(sizes[-1], 4, requires_grad=True)
        old = draw(2 if cu is None else 4, sizes[-1], 3).to(BF16)
        z, _ = short_conv(y, w, initial_state=old, cu_seqlens=cu, output_final_state=True)
        report(f"short_conv {sizes}", z, *torch.autograd.grad(z.sum(), (y, w)))
    y, w = draw(37, 3, 96).to(BF16).requires_grad_(), draw(96, requires_grad=True)
    for name, f in (
        ("rms_norm", partial(rms_norm, y, w, 1e-5)),
        ("gated norm", partial(gated_rms_norm, y, y, w, 1e-5)),
    ):
        z = f()
        report(name, z, *torch.autograd.grad(z.sum(), (y, w)))


if __name__ == "__main__":
    main()
