"""Attention Residuals: each sublayer reads a softmax mix of earlier outputs instead of their plain sum."""

from openkda.ops.attn_res.api import BankPartials, attn_res_bank, attn_res_merge, attn_res_mix

__all__ = ["BankPartials", "attn_res_bank", "attn_res_merge", "attn_res_mix"]
