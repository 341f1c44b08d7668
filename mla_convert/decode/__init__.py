"""Stage 10: absorbed decoding and generation."""

from mla_convert.decode.absorbed import ABSORBED_FILE, AbsorbedSummary, attach_absorbed, save_absorbed
from mla_convert.decode.generate import Generation, generate

__all__ = ["ABSORBED_FILE", "AbsorbedSummary", "Generation", "attach_absorbed", "generate", "save_absorbed"]
