"""A mixture-of-experts Kimi Linear on a CPU: our model and transformers' own, with the same weights, in one process.

    python benchmarks/cpu_moe.py                 # about three minutes; prints a table and writes benchmarks/results/

18 M parameters: hidden 512, 3 KDA layers and 1 MLA, 4 heads of 128, 8 experts of 256, top-2 and one shared, B = 1, float32.
Both read the same published checkpoint directory. Logits are compared before any clock starts. prefill: 1024 tokens; training:
forward + backward of the loss on 1024 tokens; decode: 32 greedy tokens after 1024. Best of several alternating runs.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_kda import best_of, environment, publish, thread_arguments
from transformers import KimiLinearForCausalLM

from openkda.models.make_checkpoint import miniature, random_model
from openkda.models.official import load_official, save_official
from openkda.models.official_config import FRESH_TEXT, OfficialConfig
from openkda.testing.compare import rel

GOALS = {"prefill": 2.5, "training": 4.0, "decode": 2.0}
STEPS = 32


def build() -> tuple[Any, Any]:
    """Our model and theirs, from one directory."""
    config = miniature(
        "kimi-linear-48b", layers=4, hidden=512, heads=4, head_dim=128, experts=8, experts_per_token=2, vocab_size=1024
    ).replace(intermediate_size=1024)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "published"
        official = OfficialConfig(config, "kimi_linear", {**FRESH_TEXT, **ids})
        save_official(random_model(config, dtype=torch.float32), path, config=official)
        return load_official(path).train(), KimiLinearForCausalLM.from_pretrained(path, dtype=torch.float32).train()


def ours(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def prefill() -> Any:
        with torch.no_grad():
            return model(ids, return_state=True)

    def training() -> None:
        model.zero_grad()
        F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()

    def decode() -> None:
        with torch.no_grad():
            out, token = start, ids[:, -1:]
            for _ in range(STEPS):
                out = model(token, state=out.state, return_state=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)

    start = prefill()
    return {"prefill": prefill, "training": training, "decode": decode}


def theirs(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def prefill() -> Any:
        with torch.no_grad():
            return model(ids, use_cache=True)

    def training() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    def decode() -> None:
        name = "cache" if "cache" in start else "past_key_values"
        cache, token = (
            copy.deepcopy(start[name]),
            ids[:, -1:],
        )  # it is written in place; the copy takes 1 ms of about 800
        with torch.no_grad():
            for _ in range(STEPS):
                out = model(token, use_cache=True, **{name: cache})
                token = out.logits[:, -1].argmax(-1, keepdim=True)

    start = prefill()
    return {"prefill": prefill, "training": training, "decode": decode}


def measure(ids: torch.Tensor, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    our_model, their_model = build()
    sides = {"ours": ours(our_model, ids), "theirs": theirs(their_model, ids)}
    difference = rel(sides["ours"]["prefill"]().logits, sides["theirs"]["prefill"]().logits)
    if not difference < 1e-5:
        raise SystemExit(f"logits differ by {difference:.2g}, nothing was timed")
    row: dict[str, Any] = {"threads": threads, "logits_difference": difference}
    for what in GOALS:
        for model in (our_model, their_model):
            model.train(what == "training")
        tokens = STEPS if what == "decode" else ids.numel()
        seconds = best_of({side: calls[what] for side, calls in sides.items()}, 20.0)
        row[what] = {who: tokens / s for who, s in seconds.items()} | {"ratio": seconds["theirs"] / seconds["ours"]}
    return row


def main() -> None:
    args = thread_arguments(__doc__).parse_args()
    env = environment()
    ids = torch.randint(3, 1024, (1, 1024), generator=torch.Generator().manual_seed(0))
    rows = [measure(ids, threads) for threads in args.threads]
    lines = [
        "# A mixture-of-experts Kimi Linear on a CPU, ours and transformers'",
        "",
        f"{env['cpu']} ({env['capability']}), torch {env['torch']}, transformers {env['transformers']}, commit "
        f"{env['commit']}, {env['date']}. 18 M parameters, B=1 T=1024 float32; written by benchmarks/cpu_moe.py.",
        "",
        "| threads | what | transformers tok/s | ours tok/s | faster | goal | logits differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for what, goal in GOALS.items():
            r = row[what]
            lines.append(
                f"| {row['threads']} | {what} | {r['theirs']:.0f} | {r['ours']:.0f} | {r['ratio']:.1f}x | {goal}x "
                f"| {row['logits_difference']:.1e} |"
            )
    publish("cpu_moe", "\n".join(lines) + "\n", {"environment": env, "rows": rows}, not args.no_write)


if __name__ == "__main__":
    main()
