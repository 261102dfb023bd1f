"""Latent Observations, Hard Actions: context layout, encoder, adapter, reading patch, checkpoints."""

__version__ = "0.1.0"
