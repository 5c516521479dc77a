"""Which instructions of a compiled kernel write to a register operand of a warp-group product that has not been waited for.

Such a product reads its A operand from registers while it runs. Neither Triton nor ptxas counts that: a value that no later
instruction names is dead for them when the product is issued, and its registers are given away.
"""

from __future__ import annotations

import os
import re
import subprocess

PRODUCT = re.compile(r"HGMMA\.64x\d+x16\.F32\S* R\d+, R(\d+), gdesc\[\S+\]")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
WRITE = re.compile(r"(\S+) (?:P\S+, )?R(\d+)")
NO_WRITE = re.compile(r"(ST|BAR|SYNCS|RED|UT|MEMBAR|FENCE|BRA)")


def _width(name: str) -> int:
    if ".128" in name or ("LDSM" in name and ".4" in name):
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1


def overwritten(cubin: str) -> list[tuple[str, str]]:
    """(instruction, the product whose operand it overwrites), in the order of the code: branches are not followed."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return overwritten_in(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s*(.*?)\s*;", code, flags=re.M))


def overwritten_in(instructions: list[str]) -> list[tuple[str, str]]:
    committed: list[dict[int, str]] = []
    open_: dict[int, str] = {}
    found = []
    for line in instructions:
        text = re.sub(r"^@!?U?P\d+ ", "", line)
        if product := PRODUCT.match(text):
            first = int(product[1])
            open_ |= dict.fromkeys(range(first, first + 4), text)
            if "gsb0" in text:
                committed, open_ = [*committed, open_], {}
        elif wait := WAIT.match(text):
            committed = committed[-int(wait[1]) :] if int(wait[1]) else []
        elif (write := WRITE.match(text)) and not NO_WRITE.match(write[1]):
            first = int(write[2])
            for r in range(first, first + _width(write[1])):
                found += [(text, group[r]) for group in committed if r in group]
    return found
