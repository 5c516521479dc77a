"""Hopper forward of KDA in Gluon: bfloat16, 128 channels, gate, l2norm and beta's sigmoid inside.

Three schedules over the same chunk algebra (factors.py); schedule.py chooses from the sizes and whether the gate is bounded:

    fused      one kernel: two warpgroups build factors while two carry the state          no workspace; packs, batches;
                                                                                           the bounded gate only
    two_pass   factors of every chunk in parallel, then the scan                           60 KB a chunk and head
    segments   the scan itself in parallel over segments, exact: transitions are merged    few heads, one long sequence

Gluon is experimental and moves between Triton releases, so any other release is refused and Triton proper takes over.
Error on bfloat16 inputs: 1.8e-3 of the output (bfloat16's own rounding is 1.7e-3) and 6e-4 of the state; keys of nearly one
direction that never forget 2.3e-3 and 1e-3 (apart.py), where the fused kernel walks a chain twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openkda.ops.device.api import GLUON_RELEASE as TRITON_RELEASE
from openkda.ops.device.api import goes_direct, transform_refusals
from openkda.ops.device.api import triton_release as _triton_release
from openkda.ops.kda.call import KDACall, KDAOutput
from openkda.ops.kda.gate import BoundedGate, Gate
from openkda.ops.kda.hopper.schedule import fits_workspace, slots

__all__ = ["refusals", "run", "step"]

HEAD = 128
MAX_SEQUENCES = 1024
"""A pack's lengths are read as one vector by every program."""
BOUNDED = 2
SHORT = 16
"""Dense calls of at most this many tokens are left to the token-by-token kernel."""
SCALES = 2.0**-10, 2.0**12
"""Queries and scores are float16 with the scale inside. At 1e-3 the output is 1.8e-3 off as at 1, at 1e-4 5e-3, at 1e-6 0.4."""


def refusals(call: KDACall) -> list[str]:
    """Why these kernels cannot run the call; empty when they can."""
    reasons = _device_refusals(call.q.device) + _option_refusals(call) + _state_refusals(call) + transform_refusals()
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "g")}
    if other := [name for name, x in tensors.items() if x.dtype != torch.bfloat16]:
        reasons.append(f"{', '.join(other)} in bfloat16, received {tensors[other[0]].dtype}")
    if other := [name for name, x in tensors.items() if x.shape[-1] != HEAD]:
        reasons.append(f"{HEAD} channels a head, received {tensors[other[0]].shape[-1]} in {', '.join(other)}")
    B, T, _, _ = call.q.shape
    HV = call.v.shape[2]
    if B * T * HV >= 2**31 or call.q.numel() == 0 or call.v.numel() == 0:
        reasons.append(f"between 1 and 2^31 token-heads, received {B * T * HV}")
    if call.cu_seqlens is None and T <= SHORT:
        reasons.append(f"more than {SHORT} tokens a sequence, received {T}")
    if not SCALES[0] <= abs(call.scale) <= SCALES[1]:
        reasons.append(f"a scale of 2^-10 to 2^12, received {call.scale}")
    if call.keeps and not _keeps_chunks():
        reasons.append("recompute other than False, received False (its backward does not read the forward's chunks)")
    if call.is_pack and call.num_sequences > MAX_SEQUENCES:
        reasons.append(f"at most {MAX_SEQUENCES} sequences in a pack, received {call.num_sequences}")
    return reasons


def _keeps_chunks() -> bool:
    from openkda.ops.kda.triton import backward

    return backward.HOPPER_WALKS


def run(call: KDACall) -> KDAOutput:
    from openkda.ops.kda.hopper import register

    A_log, dt_bias = register.as_tensor_pair(call.gate)
    bound = call.gate.lower_bound if isinstance(call.gate, BoundedGate) else 0.0
    tensors = (call.q, call.k, call.v, call.g, call.beta, A_log, dt_bias, call.cu_seqlens, call.initial_state)
    arguments = (*tensors, call.scale, bound, kind_of(call.gate), call.output_final_state)
    if call.key is not None and goes_direct(*tensors):
        return register.run_recorded(call, arguments)
    if call.needs_grad:
        from openkda.ops.kda.hopper import autograd  # hangs the Triton backward on the op

        o, final = autograd.run(call, *arguments)
    else:
        o, final = register.kda_hopper_op(*arguments)
    return KDAOutput(o, final if call.output_final_state else None)


def kind_of(gate: Gate | None) -> int:
    """The gate's number in `triton.launch.Args`."""
    return 0 if gate is None else BOUNDED if isinstance(gate, BoundedGate) else 1


def step(call: KDACall) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("impl='hopper' has no decoding step; impl='triton' has one")


def _device_refusals(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [f"needs CUDA tensors, received {device.type}"]
    reasons = []
    if torch.cuda.get_device_capability(device) != (9, 0):
        reasons.append(f"compute capability 9.0, received {torch.cuda.get_device_capability(device)}")
    if not installed():
        reasons.append(f"Gluon of Triton {TRITON_RELEASE}, received {_INSTALLED_RELEASE or 'no Triton'}")
    return reasons


def installed() -> bool:
    """Whether the Triton that these kernels are written for is there."""
    return _INSTALLED_RELEASE == TRITON_RELEASE


_INSTALLED_RELEASE = _triton_release()  # read once, and not where torch.compile would have to follow


def _option_refusals(call: KDACall) -> list[str]:
    reasons = []
    B, T, HV = call.v.shape[:3]
    work = HV * slots(T, call.num_sequences, call.is_pack)
    if kind_of(call.gate) != BOUNDED and (B > 1 or call.is_pack) and not fits_workspace(work):
        reasons.append(f"the bounded gate or one sequence or at most 2 GB of prepared chunks, received {work} chunks")
    if not call.use_qk_l2norm:
        reasons.append("use_qk_l2norm=True (float16 operands need unit keys)")
    if not call.use_beta_sigmoid:
        reasons.append("use_beta_sigmoid=True")
    return reasons


def _state_refusals(call: KDACall) -> list[str]:
    reasons = []
    if call.state_indices is not None:
        reasons.append("no state_indices")
    if call.state_positions is not None:
        reasons.append("no state_positions")
    if call.state_v_first:
        reasons.append("states [.., K, V]")
    state = call.initial_state
    if call.state_dtype != torch.float32 or (state is not None and state.dtype != torch.float32):
        reasons.append("float32 states")
    return reasons
