"""What can be seen and measured with the library: the demo, its baseline, synthetic recall tasks.

demo.py    train, save, load, compare, generate: `openkda demo`
ngram.py   the byte-trigram model that the demo's loss stands beside
tasks.py   recall, palindrome and stack sequences with known answers
"""
