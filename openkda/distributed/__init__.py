"""Ops over several processes: `register_kda_rules`, which lets `openkda.kda` run on DTensors."""

from openkda.distributed.rules import register_kda_rules

__all__ = ["register_kda_rules"]
