"""Short causal depthwise convolution over tokens, with its tail as explicit state."""

from openkda.ops.short_conv.api import short_conv, short_conv_step, short_convs

__all__ = ["short_conv", "short_conv_step", "short_convs"]
