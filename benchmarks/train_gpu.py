"""Training a 100 M hybrid on a GPU with `openkda train`, and the same model with fla's ops inside.

    python benchmarks/train_gpu.py                    all three, 40 steps each
    python benchmarks/train_gpu.py --only ours --profile

The model is the preset "100m" with a vocabulary of 32,768 (9 KDA and 3 Gated MLA layers); the text is the Python standard
library's source as bytes, packed into windows of 8,192 tokens with document borders kept. Both runs go through
`openkda.training.train` with the same seed: float32 parameters, bfloat16 autocast, Muon and AdamW. "ours" replays forward and
backward from a CUDA graph; "ours, launched" does not, and the peer cannot, which reads the documents' lengths on the host:
there the layers' `kda`, `short_convs` and norms are fla's functions, and everything else is the same code.

Time is that of whole optimizer steps, median after the warm-up. MFU counts 6 FLOPs a matrix parameter and token, causal
attention inside each document, and 21 K V a head and token for KDA's recurrence, over the data sheet's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kda import versions
from torch import Tensor

from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.ops.kda.api import BoundedGate, KDAOutput
from openkda.training.batches import Batches
from openkda.training.options import TrainOptions, model_config
from openkda.training.progress import Progress, StepReport
from openkda.training.token_file import TokenFile
from openkda.training.train import train

PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}
WARMUP = 6
NAMES = ("ours", "ours, launched", "fla")


class Recorder(Progress):
    """Step times, losses and the peak of memory after the warm-up; the row of the table when the last step is done."""

    def __init__(self, name: str, options: TrainOptions, profile: bool) -> None:
        self.name, self.options = name, options
        self.clock: list[float] = []
        self.losses: list[float] = []
        self.row: dict[str, Any] = {}
        self.flops = self.began = 0.0
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if profile else None

    def begin(self, step: int, steps: int) -> None:
        o = self.options
        batches = Batches(TokenFile(f"{o.out}/data/train"), seq_len=o.seq_len, batch_size=o.batch_size, seed=o.seed)
        self.flops = flops_a_step(model_config(o, 260), batches, range(WARMUP, steps))
        self.began = time.perf_counter()

    def step(self, report: StepReport) -> None:
        """A step's loss has been read by now, so the clock ticks once a step of the GPU, which goes on meanwhile."""
        self.clock.append(time.perf_counter())
        self.losses.append(report.loss)
        if report.step == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        if self.profile is not None and report.step == WARMUP:
            torch.cuda.synchronize()
            self.profile.start()
        if self.profile is not None and report.step == WARMUP + 2:
            torch.cuda.synchronize()
            self.profile.stop()
            print(self.profile.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))
        if report.step == self.options.steps:
            self.row = self.summary()
            print(json.dumps(self.row), flush=True)

    def summary(self) -> dict[str, Any]:
        skip = WARMUP + 3 if self.profile is not None else WARMUP
        step = statistics.median(b - a for a, b in itertools.pairwise(self.clock[skip - 1 :]))
        tokens = self.options.batch_size * self.options.seq_len
        top = PEAK.get(torch.cuda.get_device_name())
        with torch.device("meta"):
            parameters = HybridLM(model_config(self.options, 260)).num_parameters()
        return {
            "ops": self.name, "parameters": parameters, "tokens a step": tokens, "ms a step": step * 1e3,
            "tokens/s": tokens / step, "TFLOP a step": self.flops / 1e12,
            "MFU %": None if top is None else 100 * self.flops / step / top,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30, "first step s": self.clock[0] - self.began,
            "loss first": self.losses[0], "loss last": statistics.mean(self.losses[-5:]), "steps": len(self.losses),
        }  # fmt: skip


@contextmanager
def fla_ops() -> Iterator[None]:
    """The layers' functions replaced by fla's."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import rms_norm
    from fla.ops.kda import chunk_kda

    offsets: list[tuple[Tensor, Tensor]] = []

    def wide(cu: Tensor | None) -> Tensor | None:
        """int64 offsets, one tensor a batch: fla keeps what it derives from them by the tensor's identity."""
        if cu is None:
            return None
        if not offsets or offsets[-1][0] is not cu:
            offsets[:] = [(cu, cu.long())]
        return offsets[-1][1]

    def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gate: BoundedGate, cu_seqlens: Tensor | None = None,
            initial_state: Tensor | None, output_final_state: bool, **_: Any) -> KDAOutput:  # fmt: skip
        o, state = chunk_kda(
            q, k, v, g, beta, A_log=gate.A_log, dt_bias=gate.dt_bias, lower_bound=gate.lower_bound, safe_gate=True,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=wide(cu_seqlens),
        )  # fmt: skip
        return KDAOutput(o, state)

    def convs(
        xs: list[Tensor], weights: list[Tensor], *, cu_seqlens: Tensor | None = None, **_: Any
    ) -> tuple[Any, None]:
        """Without final states: training asks for none, and fla's have another layout."""
        cu = wide(cu_seqlens)
        return [
            causal_conv1d(x, w, activation="silu", cu_seqlens=cu)[0] for x, w in zip(xs, weights, strict=True)
        ], None

    def plain(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
        y = rms_norm(x, weight, None, eps=eps)
        return y if dtype is None else y.to(dtype)

    def added(x: Tensor, a: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        y, total = rms_norm(a, weight, None, residual=x, eps=eps, prenorm=True)
        return total, y if dtype is None else y.to(dtype)

    def gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)

    with ExitStack() as stack:
        for name, function in (
            ("kda.kda", kda),
            ("kda.short_convs", convs),
            ("norm.rms_norm", plain),
            ("norm.add_rms_norm", added),
            ("norm.gated_rms_norm", gated),
        ):
            stack.enter_context(mock.patch(f"openkda.layers.{name}", function))
        yield


def flops_a_step(config: ModelConfig, batches: Batches, steps: range) -> float:
    """Forward and backward, mean over `steps`; what is computed twice to save memory would not count."""
    with torch.device("meta"):
        model = HybridLM(config)
    tokens = batches.batch_size * batches.seq_len
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n)
    matrices += config.vocab_size * config.hidden_size * config.tie_word_embeddings
    kda = 7 * config.kda_head_dim * config.kda_v_dim * config.kda_v_heads * len(config.kda_layers)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    pairs = statistics.mean(
        sum((b - a) * (b - a + 1) / 2 for a, b in itertools.pairwise(batches.micro_batch(i, 0, 1).cu_seqlens.tolist()))
        for i in steps
    )
    attention = 2 * pairs * width * config.num_attention_heads * len(config.full_attn_layers)
    return 3 * (tokens * (2 * matrices + kda) + attention)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = TrainOptions(
            data=(args.data,), out=f"{folder}/run", preset="100m", model={"vocab_size": 32768}, seq_len=args.seq_len,
            batch_size=args.batch, steps=args.steps, lr=2e-3, warmup=0.1, val_every=10**9, val_tokens=args.seq_len,
            checkpoint_every=10**9, device="cuda", cuda_graph=name == "ours",
        )  # fmt: skip
        if name == "fla":
            stack.enter_context(fla_ops())
        recorder = Recorder(name, options, args.profile)
        train(options, progress=recorder)
    return recorder.row


def show(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 10 else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--data", default="python-stdlib")
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--profile", action="store_true", help="print the longest kernels of two steps")
    parser.add_argument("--out", type=Path, help="folder for train-100m.json and .md; default: print only")
    args = parser.parse_args()
    rows = []
    for name in NAMES if args.only is None else (args.only,):
        rows.append(measure(name, args))
    about = versions()
    lines = ["| | " + " | ".join(r["ops"] for r in rows) + " |", "|---|" + "---:|" * len(rows)]
    lines += [f"| {k} | " + " | ".join(show(r[k]) for r in rows) + " |" for k in rows[0] if k != "ops"]
    text = f"{', '.join(f'{k} {v}' for k, v in about.items())}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / ("train-100m-" + about["device"].lower().replace(" ", "-"))
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
