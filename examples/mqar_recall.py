"""How many key-value pairs fit into a state of fixed size? Train on 8 pairs, then ask for more and more.

python examples/mqar_recall.py [--steps 130]
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

from openkda import HybridLM, ModelConfig
from openkda.lab.tasks import mqar
from openkda.training.optim import Optimizer, group_parameters
from openkda.training.schedule import rate

PAIRS, SYMBOLS, BATCH, LEARNING_RATE = 8, 32, 32, 1e-2
HEADS, HEAD_DIM = 2, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=130)
    options = parser.parse_args()

    rng = torch.Generator().manual_seed(0)
    config = ModelConfig(
        vocab_size=mqar(1, 1, symbols=SYMBOLS, rng=rng).vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        kda_layers=(1, 2),
        full_attn_layers=(),
        kda_num_heads=HEADS,
        kda_head_dim=HEAD_DIM,
        gate_lower_bound=-5.0,
        num_attention_heads=1,
    )
    model = HybridLM(config)
    model.init_weights(0)
    optimizer = Optimizer(group_parameters(model), lr=LEARNING_RATE, weight_decay=0.0, momentum=0.95, betas=(0.9, 0.95))
    print(f"training on {PAIRS} pairs of {SYMBOLS} keys and {SYMBOLS} values; chance is {1 / SYMBOLS:.2f}")
    for step in range(1, options.steps + 1):
        optimizer.set_rate(LEARNING_RATE * rate(step / options.steps, warmup=0.05, end=0.1))
        task = mqar(BATCH, PAIRS, symbols=SYMBOLS, rng=rng)
        logits = model(task.input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), task.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 26 == 0 or step == options.steps:
            print(f"step {step:4}  loss {loss.item():.3f}  recalled {task.accuracy(logits):6.1%}", flush=True)

    print(
        f"\nthe same state, {HEADS} matrices of {HEAD_DIM} x {HEAD_DIM} a layer, asked for more than it was trained on:"
    )
    for pairs in (4, 8, 12, 16, 24, 32):
        task = mqar(64, pairs, symbols=SYMBOLS, rng=rng)
        with torch.no_grad():
            recalled = task.accuracy(model(task.input_ids).logits)
        print(f"{pairs:4} pairs  {recalled:6.1%}  {'#' * round(40 * recalled)}")


if __name__ == "__main__":
    main()
