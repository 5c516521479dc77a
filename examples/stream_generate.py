"""Generation by hand: a batch of prompts, a prefix that is computed once and forked, a stream of text.

python examples/stream_generate.py                          # an untrained model: noise, but the right shapes
python examples/stream_generate.py --checkpoint runs/demo   # after `openkda demo`
"""

from __future__ import annotations

import argparse
import sys

from openkda import PRESETS, HybridLM
from openkda.generation.console import visible
from openkda.generation.decoder import Decoder
from openkda.generation.generate import complete, generate
from openkda.generation.sampling import SamplingOptions
from openkda.generation.state import StateStore
from openkda.models.checkpoint import load_checkpoint
from openkda.models.tokenizer import load_tokenizer
from openkda.training.run_directory import find_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint or run directory")
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    if options.checkpoint:
        found = find_checkpoint(options.checkpoint)
        model, tokenizer = load_checkpoint(found), load_tokenizer(found)
    else:
        model, tokenizer = HybridLM(PRESETS["tiny"]), load_tokenizer("bytes")
        model.init_weights(0)

    print("--- prompts of different lengths in one batch; a row that meets its stop string leaves")
    prompts = ["import ", "def main():\n    ", "class Stack:\n    def push(self, x):\n        "]
    sampling = SamplingOptions(max_new_tokens=options.tokens, temperature=0.7, seed=3, stop_strings=("\n\n",))
    done = complete(model, [tokenizer.encode(p) for p in prompts], sampling, tokenizer=tokenizer)
    for prompt, row in zip(prompts, done, strict=True):
        print(f"{prompt + row.text!r}  ({len(row.tokens)} tokens, {row.finish})")

    print("\n--- one prefix, computed once, continued by two sequences")
    prefix = [tokenizer.eos_id, *tokenizer.encode('"""Tests of the parser."""\n\nimport unittest\n\n\n')]
    decoder = Decoder(model)
    decoder.prefill([prefix])
    assert decoder.state is not None
    store = StateStore(slots=2)
    first = store.acquire()
    store.write(first, decoder.state)
    second = store.fork(first)
    print(f"{len(prefix)} tokens put aside in {store.nbytes(first):,} bytes")
    forked = Decoder(model, state=store.read([first, second]))
    endings = [tokenizer.encode("class "), tokenizer.encode("def ")]
    texts = ["class ", "def "]
    for step in generate(model, endings, sampling, tokenizer=tokenizer, decoder=forked):
        texts[step.row] += step.text
    for text in texts:
        print(repr(text))

    print("\n--- as it comes")
    sampling = SamplingOptions(max_new_tokens=options.tokens, temperature=0.7, top_p=0.95, seed=5)
    for step in generate(model, [[]], sampling, tokenizer=tokenizer):
        sys.stdout.write(visible(step.text))
        sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()
