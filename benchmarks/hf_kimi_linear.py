"""transformers' kimi_linear model on a CPU, as it comes and with `openkda.compat.hf.patch()`, side by side.

    python benchmarks/hf_kimi_linear.py          # about three minutes; prints a table and writes benchmarks/results/

18 M parameters (3 KDA layers and 1 MLA, 4 heads of 128, 8 experts), B = 1, T = 1024, float32. Logits are compared before any
clock starts. "training" is forward + backward of the loss. Best of several alternating
runs, processor time with one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cpu_kda import best_of, environment, publish, thread_arguments
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from openkda.compat import hf
from openkda.testing.compare import rel


def build() -> Any:
    config = KimiLinearConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, num_local_experts=8, num_experts_per_tok=2, linear_head_dim=128, linear_num_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    )  # fmt: skip
    torch.manual_seed(0)
    return KimiLinearForCausalLM(config)


def measure(model: Any, ids: torch.Tensor, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    def training() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    def patched(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with hf.patched():
                return call()

        return run

    difference = rel(patched(forward)(), forward())
    if not difference < 1e-5:
        raise SystemExit(f"logits differ by {difference:.2g}, nothing was timed")
    row: dict[str, Any] = {"threads": threads, "logits_difference": difference}
    for name, call in (("forward", forward), ("training", training)):
        seconds = best_of({"patched": patched(call), "plain": call}, 10.0)
        row[name] = {who: ids.numel() / s for who, s in seconds.items()} | {
            "ratio": seconds["plain"] / seconds["patched"]
        }
    return row


def main() -> None:
    args = thread_arguments(__doc__).parse_args()
    env = environment()
    model = build()
    ids = torch.randint(3, 1024, (1, 1024), generator=torch.Generator().manual_seed(0))
    rows = [measure(model, ids, threads) for threads in args.threads]
    lines = [
        "# kimi_linear of transformers on a CPU, plain and patched",
        "",
        f"{env['cpu']} ({env['capability']}), torch {env['torch']}, transformers {env['transformers']}, commit "
        f"{env['commit']}, {env['date']}. 18 M parameters, B=1 T=1024 float32; written by benchmarks/hf_kimi_linear.py.",
        "",
        "| threads | what | plain tok/s | patched tok/s | faster | logits differ by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for what in ("forward", "training"):
            r = row[what]
            lines.append(
                f"| {row['threads']} | {what} | {r['plain']:.0f} | {r['patched']:.0f} | {r['ratio']:.1f}x "
                f"| {row['logits_difference']:.1e} |"
            )
    publish("hf_kimi_linear", "\n".join(lines) + "\n", {"environment": env, "rows": rows}, not args.no_write)


if __name__ == "__main__":
    main()
