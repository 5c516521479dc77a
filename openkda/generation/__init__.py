"""From a prompt to tokens: prefill in chunks, then steps on a state of constant size; sampling, stop conditions, streaming.

decoder.py    model + state: prefill, step, rows that leave
sampling.py   logits to token ids
text.py       token ids to text, piece by piece; stop strings
generate.py   the loop over the three
graph.py      the steps of a batch as one CUDA graph
state.py      states put aside: slots, snapshots, forks, bytes
console.py    a terminal that shows the text and what the state weighs
"""
