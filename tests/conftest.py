"""Tests make few calls of very many kinds: a kernel is compiled when it is launched, and not for calls that never come."""

import os

os.environ.setdefault("OPENKDA_COMPILE_AHEAD", "0")
