"""Whole models: config, stacking, presets, checkpoints."""
