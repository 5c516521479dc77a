"""What a running sequence costs: the KDA state stays, the MLA latents grow a little, full attention's cache grows a lot.

python examples/state_is_constant.py [--tokens 2048] [--preset demo]
"""

from __future__ import annotations

import argparse

import torch

from openkda import PRESETS, HybridLM
from openkda.generation.console import size
from openkda.generation.decoder import Decoder
from openkda.layers.state import KDAState
from openkda.models.inspect import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--preset", default="demo", choices=["tiny", "demo"])
    options = parser.parse_args()

    model = HybridLM(PRESETS[options.preset])  # untrained: its memory is the same
    report = describe(model.config, dtype=torch.float32)
    tokens = torch.randint(0, 256, (options.tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    decoder = Decoder(model)
    rows, done, width = [], 0, 50
    while done < len(tokens):
        step = max(1, len(tokens) // 8)
        decoder.prefill([tokens[done : done + step]])  # a later prefill continues the same sequence
        done = min(len(tokens), done + step)
        assert decoder.state is not None
        kda = sum(layer.nbytes for layer in decoder.state if isinstance(layer, KDAState))
        rows.append((done, kda, decoder.state_bytes - kda, report.full_attention_bytes(done)))

    scale = width / rows[-1][3]
    print(
        f"{'tokens':>7}  {'KDA state':>10}  {'latents':>10}  {'full attention':>14}   # KDA  + latents  . full attention"
    )
    for done, kda, latents, full in rows:
        a, b, c = (round(n * scale) for n in (kda, kda + latents, full))
        bar = "#" * max(1, a) + "+" * (b - a) + "." * (c - b)
        print(f"{done:7}  {size(kda):>10}  {size(latents):>10}  {size(full):>14}   {bar}")

    measured, promised = decoder.state_bytes, report.state_bytes(options.tokens)
    print(f"\nMeasured {measured:,} bytes; the configuration promises {promised:,}.")
    big = describe("kimi-k3")
    for n in (100_000, 1_000_000):
        ours, full = size(big.state_bytes(n)), size(big.full_attention_bytes(n))
        print(f"Kimi K3 at {n:,} tokens: {ours}; full attention in every layer: {full}.")


if __name__ == "__main__":
    main()
