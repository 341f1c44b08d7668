"""Decode kernels for multi-head latent attention. They take tensors and know nothing of ``mla_convert``."""
