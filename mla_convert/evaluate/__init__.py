"""Stage 9: perplexity, agreement with the source model, and measured cache bytes."""

from mla_convert.evaluate.cache import cache_bytes_per_token
from mla_convert.evaluate.compare import Comparison, compare
from mla_convert.evaluate.load import load_for_evaluation
from mla_convert.evaluate.perplexity import Perplexity, perplexity

__all__ = ["Comparison", "Perplexity", "cache_bytes_per_token", "compare", "load_for_evaluation", "perplexity"]
