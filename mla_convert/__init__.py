"""Convert grouped-query attention checkpoints to multi-head latent attention, and measure what it cost."""

__version__ = "0.1.0"
