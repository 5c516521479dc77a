"""A model of 1.6 B parameters on a GPU: prefill and decoding in bfloat16 and with packed MXFP4 experts, beside transformers'.

    python benchmarks/k3_gpu.py                # about a minute, and what fla-core takes to tune itself the first time
    python benchmarks/k3_gpu.py --no-peer      # our own rows only

12 layers of width 2048, 16 heads of 128, 32 experts, 4 a token. Two architectures of one size: Kimi K3's (Attention Residuals,
LatentMoE, bounded gate, low-rank queries, gated MLA), which transformers does not have, and Kimi Linear's, which it has as
`kimi_linear` and computes with fla-core where that is installed. Both load the same published checkpoint. Logits are compared
first, against the same weights in float32 and with selection biases that no rounding can overrule (a token that takes another
expert is no error of arithmetic): at most twice the error of the same bfloat16 model in plain torch, on the CPU, and at most
twice the peer's; packed experts have the plain ones' values. Then the biases are 0, so that tokens spread over the experts.
prefill: one sequence of 8,192 tokens, logits of the last; decode: greedy steps for one sequence after 8,192 tokens and for 32
after 1,024 each, called from Python and, ours, replayed from a CUDA graph (openkda/generation/graph.py). Medians of whole
calls, wall clock. Memory: weights, and the peak of anything allocated in the prefill.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from openkda.generation.graph import GraphDecoder
from openkda.layers.moe import Experts, SparseMoE, pack_experts
from openkda.layers.parameters import init_weights
from openkda.models.config import ModelConfig
from openkda.models.hybrid import HybridLM
from openkda.models.official import save_official
from openkda.models.official_config import FRESH_TEXT, OfficialConfig
from openkda.models.presets import PRESETS
from openkda.ops.mx.api import pack_mxfp4, unpack_mxfp4

SIZES: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 12, "intermediate_size": 8192,
    "kda_layers": tuple(i for i in range(1, 13) if i % 4), "full_attn_layers": (4, 8, 12), "kda_num_heads": 16,
    "num_attention_heads": 16, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
}  # fmt: skip
LINEAR = PRESETS["kimi-linear-48b"].replace(**SIZES, moe_intermediate_size=512)
K3 = PRESETS["kimi-k3"].replace(
    **SIZES, q_lora_rank=768, attn_res_block_size=4, moe_intermediate_size=1024, routed_expert_hidden_size=1024,
    mla_fp32_output=False, vision=None,
)  # fmt: skip
CHECKED = 512  # tokens whose logits are compared
PROMPT, BATCH, BATCH_PROMPT = 8192, 32, 1024
Row = dict[str, Any]


class Ours:
    """prefill(ids) -> logits of the last token, keeping the state; step(token [B, 1]) -> logits of the next."""

    def __init__(self, model: HybridLM) -> None:
        self.model, self.state = model, None

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        self.state = None
        out = self.model(ids, return_state=True, last_only=True)
        self.state = out.state
        return out.logits

    def step(self, token: torch.Tensor) -> torch.Tensor:
        out = self.model(token, state=self.state, return_state=True)
        self.state = out.state
        return out.logits


class Theirs(Ours):
    """The same of a transformers model, whose cache is written in place."""

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        self.state = None
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        self.name = "cache" if "cache" in out else "past_key_values"
        self.state = out[self.name]
        return out.logits

    def step(self, token: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=token, use_cache=True, **{self.name: self.state}).logits


def build(config: ModelConfig) -> HybridLM:
    """A random bfloat16 model on the GPU, whose expert matrices hold only values that MXFP4 has, for `error_of`."""
    with torch.device("meta"):
        model = HybridLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    torch.manual_seed(0)
    init_weights(model, config.initializer_range)
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        for w in (experts.w1, experts.w2, experts.w3):
            w.data.copy_(unpack_mxfp4(*pack_mxfp4(w.detach())))
    for bias in selection_biases(model):
        bias.copy_(torch.randperm(bias.numel()))  # one apart, and scores lie in 0..1
    return model.eval()


def selection_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [t.data for name, t in named if name.endswith("e_score_correction_bias")]


def packed(model: HybridLM) -> HybridLM:
    """Its twin with packed experts. Every other weight is shared, so only the experts cost memory again."""
    shared = {id(p): p for p in model.parameters()}
    twin = copy.deepcopy(model, shared)  # type: ignore[arg-type]
    pack_experts(twin)
    return twin


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def seconds(call: Callable[[], Any], least: int = 3, limit: float = 1.0) -> float:
    """Median of whole calls, each waited for; at least `least` after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < least or sum(times) < limit:
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def measure(name: str, side: Ours, ids: torch.Tensor, errors: tuple[float, float], steps: int) -> Row:
    replayed = not isinstance(side, Theirs)
    if replayed:
        check_graph(side, ids[:1, :CHECKED])
    for bias in selection_biases(side.model):
        bias.zero_()
    prompt, batch = ids[:1, :PROMPT], ids[:, :BATCH_PROMPT]
    side.prefill(prompt)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    row: Row = {"model": name, "logits_error": errors[0], "plain_error": errors[1]}
    row["weights_gib"] = weight_bytes(side.model) / 2**30
    there = torch.cuda.memory_allocated()
    row["prefill"] = PROMPT / seconds(lambda: side.prefill(prompt))
    row["peak_gib"] = row["weights_gib"] + (torch.cuda.max_memory_allocated() - there) / 2**30
    for count, start in (("1", prompt), ("32", batch)):
        token = side.prefill(start)[:, -1].argmax(-1)
        row[f"graph_{count}"] = None
        if replayed:
            decoder = GraphDecoder(side.model, state=side.state)
            decoder.step(token)
            row[f"graph_{count}"] = speed(decoder.step, token, steps)
            del decoder
        row[f"decode_{count}"] = speed(lambda t: side.step(t.unsqueeze(1))[:, 0], token, steps)
    side.state = None
    return row


def speed(step: Callable[[torch.Tensor], torch.Tensor], token: torch.Tensor, steps: int) -> float:
    """Tokens a second of greedy steps from `token` [N]."""

    def decode() -> None:
        t = token
        for _ in range(steps):
            t = step(t).argmax(-1)

    return token.numel() * steps / seconds(decode, limit=0.5)


def check_graph(side: Ours, ids: torch.Tensor) -> None:
    token = side.prefill(ids)[:, -1].argmax(-1)
    decoder = GraphDecoder(side.model, state=side.state)
    for _ in range(3):
        a, b = decoder.step(token).float(), side.step(token.unsqueeze(1))[:, 0].float()
        require(float((a - b).norm() / b.norm()), 1e-2, "logits from a graph, beside the same step without one")
        token = b.argmax(-1)


@torch.inference_mode()
def error_of(side: Ours, ids: torch.Tensor, reference: torch.Tensor) -> float:
    return float((side.logits(ids).float() - reference).norm() / reference.norm())


@torch.inference_mode()
def reference_of(model: HybridLM, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits of the same weights in float32; the error of the same bfloat16 model without any kernel of ours, on the CPU."""
    exact = copy.deepcopy(model).float()(ids).logits
    return exact, error_of(Ours(copy.deepcopy(model).cpu()), ids.cpu(), exact.cpu())


@contextmanager
def published(model: HybridLM) -> Iterator[Path]:
    """The model as a published directory, in memory where the system has such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        text = {**FRESH_TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16"}
        path = Path(directory) / "published"
        save_official(model, path, config=OfficialConfig(model.config, "kimi_linear", text))
        yield path


def peer(model: HybridLM) -> Theirs:
    from transformers import KimiLinearForCausalLM

    with published(model) as path:
        other = KimiLinearForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    return Theirs(other)


def runs_on() -> str:
    """What transformers' model computes KDA with."""
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    function = module.chunk_kimi_delta_attention
    bound = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found = bound["implementation"].cell_contents if "implementation" in bound else function
    return "fla-core" if found.__module__.startswith("fla.") else "plain torch"


def k3_rows(ids: torch.Tensor, steps: int) -> Iterator[Row]:
    model = build(K3)
    check, twin = ids[:1, :CHECKED], packed(model)
    reference, normal = reference_of(model, check)
    plain, small = (error_of(Ours(m), check, reference) for m in (model, twin))
    require(plain, normal, "our bfloat16 logits")
    require(small, normal, "packed experts")
    yield measure("K3 style, bfloat16", Ours(model), ids, (plain, normal), steps)
    for module in model.modules():  # their matrices are no longer needed: the twin has the rest
        if isinstance(module, SparseMoE):
            del module.experts
    yield measure("K3 style, packed MXFP4 experts", Ours(twin), ids, (small, normal), steps)


def linear_rows(ids: torch.Tensor, steps: int, with_peer: bool) -> Iterator[Row]:
    model = build(LINEAR)
    check = ids[:1, :CHECKED]
    reference, normal = reference_of(model, check)
    error = error_of(Ours(model), check, reference)
    require(error, normal, "our bfloat16 logits")
    if with_peer:
        theirs = peer(model)
        their_error = error_of(theirs, check, reference)
        require(error, their_error, "our bfloat16 logits beside the peer's")
    yield measure("Kimi Linear style, bfloat16", Ours(model), ids, (error, normal), steps)
    if with_peer:
        del model
        torch.cuda.empty_cache()
        yield measure(f"the same in transformers with {runs_on()}", theirs, ids, (their_error, normal), steps)


def require(error: float, budget: float, what: str) -> None:
    if not error <= 2 * budget:
        raise SystemExit(f"{what}: error {error:.3g}, more than twice {budget:.3g}")


def environment() -> dict[str, str]:
    import importlib.metadata as versions

    found = {}
    for package in ("torch", "triton", "transformers", "fla-core"):
        try:
            found[package] = versions.version(package)
        except versions.PackageNotFoundError:
            found[package] = "none"
    return {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), **found}


COLUMNS = {
    "model": "",
    "prefill": "prefill tok/s",
    "decode_1": "decode tok/s, 1 sequence",
    "graph_1": "in a graph",
    "decode_32": "decode tok/s, 32 sequences",
    "graph_32": "in a graph",
    "weights_gib": "weights GiB",
    "peak_gib": "peak of the prefill GiB",
    "logits_error": "logits' error",
    "plain_error": "plain torch's",
}


def line(row: Row) -> str:
    speeds = [f"{row[c]:,.0f}" if row[c] else "-" for c in ("prefill", "decode_1", "graph_1", "decode_32", "graph_32")]
    memory = [f"{row[c]:.2f}" for c in ("weights_gib", "peak_gib")]
    return (
        "| "
        + " | ".join([row["model"], *speeds, *memory, *(f"{row[c]:.1e}" for c in ("logits_error", "plain_error"))])
        + " |"
    )


def header() -> list[str]:
    return ["| " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]


def write(rows: list[Row], env: dict[str, str], out: Path) -> None:
    name = f"k3_gpu-{env['gpu'].lower().replace(' ', '-')}"
    about = ", ".join(f"{k} {v}" for k, v in env.items() if k not in ("gpu", "date"))
    text = [
        f"# A model of 1.6 B parameters on one {env['gpu']}",
        "",
        f"{about}; {env['date']}; written by benchmarks/k3_gpu.py, which says what the columns are.",
        "",
        *header(),
        *map(line, rows),
    ]
    (out / f"{name}.md").write_text("\n".join(text) + "\n")
    (out / f"{name}.json").write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--steps", type=int, default=16, help="tokens of one decoding measurement")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"), help="directory of the result files")
    args = parser.parse_args()
    ids = torch.randint(3, SIZES["vocab_size"], (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).cuda()
    print("\n".join(header()), flush=True)
    rows = []
    for found in (k3_rows(ids, args.steps), linear_rows(ids, args.steps, not args.no_peer)):
        for row in found:
            rows.append(row)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    if not args.no_write:
        write(rows, environment(), Path(args.out))


if __name__ == "__main__":
    main()
