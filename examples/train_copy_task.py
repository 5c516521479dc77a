"""Two KDA layers learn to say a sequence backwards: the first tokens must survive in the state until the end.

python examples/train_copy_task.py [--length 16] [--steps 150]
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

from openkda import HybridLM, ModelConfig
from openkda.lab.tasks import palindrome
from openkda.training.optim import Optimizer, group_parameters
from openkda.training.schedule import rate

SYMBOLS, BATCH, LEARNING_RATE = 16, 32, 1e-2


def small_model(vocab_size: int) -> HybridLM:
    """Two KDA layers and no attention: everything that is recalled comes out of two 32 x 32 matrices a layer."""
    model = HybridLM(
        ModelConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            kda_layers=(1, 2),
            full_attn_layers=(),
            kda_num_heads=2,
            kda_head_dim=32,
            gate_lower_bound=-5.0,
            num_attention_heads=1,
        )
    )
    model.init_weights(0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    rng = torch.Generator().manual_seed(0)
    model = small_model(palindrome(1, 1, symbols=SYMBOLS, rng=rng).vocab_size)
    optimizer = Optimizer(group_parameters(model), lr=LEARNING_RATE, weight_decay=0.0, momentum=0.95, betas=(0.9, 0.95))
    print(f"{model.num_parameters():,} parameters; chance is {1 / SYMBOLS:.2f}")
    for step in range(1, options.steps + 1):
        optimizer.set_rate(LEARNING_RATE * rate(step / options.steps, warmup=0.05, end=0.1))
        task = palindrome(BATCH, options.length, symbols=SYMBOLS, rng=rng)
        logits = model(task.input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), task.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == options.steps:
            print(f"step {step:4}  loss {loss.item():.3f}  right {task.accuracy(logits):6.1%}", flush=True)

    task = palindrome(1, options.length, symbols=SYMBOLS, rng=rng)
    with torch.no_grad():
        guess = model(task.input_ids).logits[0, options.length :].argmax(-1).tolist()
    print(f"\nsaid       {' '.join(f'{x:2}' for x in task.input_ids[0, : options.length].tolist())}")
    print(f"backwards  {' '.join(f'{x:2}' for x in task.targets[0, options.length :].tolist())}")
    print(f"model      {' '.join(f'{x:2}' for x in guess)}")


if __name__ == "__main__":
    main()
