"""Multi-head latent attention over a cache of one small latent a token, shared by all heads."""

from openkda.ops.mla.api import mla, reads_packs

__all__ = ["mla", "reads_packs"]
