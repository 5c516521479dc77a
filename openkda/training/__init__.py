"""The training loop and what it stands on: text files -> token files -> batches -> steps -> checkpoints.

Start at `train.py` (one run from options to result); `options.py` lists what can be set.
"""
