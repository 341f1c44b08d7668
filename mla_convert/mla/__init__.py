"""The MLA side: one layer's weights, its names, and the transformers model class (registered on import)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mla_convert.mla.configuration_mla import MLAConfig
from mla_convert.mla.modeling_mla import MLAForCausalLM, MLAModel
from mla_convert.mla.weights import MLAWeights

AutoConfig.register(MLAConfig.model_type, MLAConfig, exist_ok=True)
AutoModel.register(MLAConfig, MLAModel, exist_ok=True)
AutoModelForCausalLM.register(MLAConfig, MLAForCausalLM, exist_ok=True)

__all__ = ["MLAConfig", "MLAForCausalLM", "MLAModel", "MLAWeights"]
