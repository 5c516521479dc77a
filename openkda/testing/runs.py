"""Running the KDA op for a test: outputs and gradients by name, and the peak of memory that a call allocates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from openkda.ops.kda.api import kda
from openkda.testing.compare import rel, rel_grad
from openkda.testing.inputs import KDAInputs


def outputs(x: KDAInputs, op: Callable[..., Any] = kda, **options: Any) -> dict[str, Tensor]:
    """o and S (the final state), without gradients. options overrides the inputs' own."""
    with torch.no_grad():
        out = op(x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | options))
    return {"o": out.output, "S": out.final_state}


def gradients(x: KDAInputs, op: Callable[..., Any] = kda, **options: Any) -> dict[str, Tensor]:
    """o, S and d<name> of every differentiable input, for the upstream gradients x.do and x.dS."""
    x = x.to().requires_grad_()
    out = op(x.q, x.k, x.v, x.g, x.beta, **(x.kwargs() | options))
    named = x.tensors()
    ends = [(t, d) for t, d in ((out.output, x.do), (out.final_state, x.dS)) if t.requires_grad]  # no tokens: no graph
    leaves = list(named.values())
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if ends:
        grads = torch.autograd.grad([t for t, _ in ends], leaves, [d for _, d in ends], allow_unused=True)
    found = {f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(named.items(), grads, strict=True)}
    return {"o": out.output.detach(), "S": out.final_state.detach()} | found


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each: plain for o and S, with the gradient floor (compare.rel_grad) for gradients."""
    return {
        n: rel_grad(got[n], w, want["dq"]) if n.startswith("d") and "dq" in want else rel(got[n], w)
        for n, w in want.items()
    }


def check_errors(
    got: dict[str, Tensor], want: dict[str, Tensor], limit: float, grad_limit: float | None = None
) -> None:
    """AssertionError naming every result above its limit."""
    found = errors(got, want)
    bad = {n: e for n, e in found.items() if not e <= ((grad_limit or limit) if n.startswith("d") else limit)}
    if bad:
        shown = ", ".join(f"{n} {e:.3g}" for n, e in bad.items())
        raise AssertionError(f"relative errors above {limit:g} (gradients {grad_limit or limit:g}): {shown}")


def peak_bytes(call: Callable[[], Any]) -> int:
    """Largest sum of CPU tensor memory that is alive at once inside `call`, counted from its start.

    Runs with one thread: the profiler sees no other thread's memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            result = call()
    finally:
        torch.set_num_threads(threads)
    del result
    sizes = [e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return peak
