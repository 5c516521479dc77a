"""Cross-entropy of rows of logits, one program a row: its loss, and the logits overwritten by softmax minus one-hot."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.ops.triton.api import LOG2E

LOWEST = tl.constexpr(-1.0e38)
"""In place of -inf behind the end of a row: a lane that has seen nothing else must not subtract two infinities."""


@triton.jit
def loss_kernel(logits_p, target_p, loss_p, V, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = logits_p + r * V
    target = tl.load(target_p + r)
    chosen = tl.load(row + target).to(tl.float32)  # before the row is overwritten
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + lane, start + lane < V, other=LOWEST).to(tl.float32)
        new = tl.maximum(top, x)
        total = total * tl.exp2((top - new) * LOG2E) + tl.exp2((x - new) * LOG2E)
        top = new
    highest = tl.max(top, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp2((top - highest) * LOG2E), axis=0))
    tl.store(loss_p + r, log_sum - chosen)
    if GRADIENT:
        for start in range(0, V, BLOCK):
            column = start + lane
            x = tl.load(row + column, column < V, other=LOWEST).to(tl.float32)
            d = tl.exp2((x - log_sum) * LOG2E) - tl.where(column == target, 1.0, 0.0)
            tl.store(row + column, d.to(logits_p.dtype.element_ty), column < V)
