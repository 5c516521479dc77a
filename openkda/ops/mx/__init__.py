"""Microscaling formats: MXFP4 packing as published for Kimi K3's experts, and fake quantisation for training."""

from openkda.ops.mx.api import BLOCK, MXFormat, ScaleRule, fake_quantize, pack_mxfp4, unpack_mxfp4

__all__ = ["BLOCK", "MXFormat", "ScaleRule", "fake_quantize", "pack_mxfp4", "unpack_mxfp4"]
