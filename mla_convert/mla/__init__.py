"""The MLA side: one layer's weights, its names, and the transformers model classes (registered on import).

With the import, transformers' Auto classes load the native format and the exported ``deepseek_mla`` without remote
code; transformers alone imports nothing of this package.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mla_convert.mla.configuration_deepseek_mla import DeepseekMLAConfig
from mla_convert.mla.configuration_mla import MLAConfig
from mla_convert.mla.modeling_deepseek_mla import DeepseekMLAForCausalLM, DeepseekMLAModel
from mla_convert.mla.modeling_mla import MLAForCausalLM, MLAModel
from mla_convert.mla.weights import MLAWeights

AutoConfig.register(MLAConfig.model_type, MLAConfig, exist_ok=True)
AutoModel.register(MLAConfig, MLAModel, exist_ok=True)
AutoModelForCausalLM.register(MLAConfig, MLAForCausalLM, exist_ok=True)
AutoConfig.register(DeepseekMLAConfig.model_type, DeepseekMLAConfig, exist_ok=True)
AutoModel.register(DeepseekMLAConfig, DeepseekMLAModel, exist_ok=True)
AutoModelForCausalLM.register(DeepseekMLAConfig, DeepseekMLAForCausalLM, exist_ok=True)

__all__ = [
    "DeepseekMLAConfig",
    "DeepseekMLAForCausalLM",
    "DeepseekMLAModel",
    "MLAConfig",
    "MLAForCausalLM",
    "MLAModel",
    "MLAWeights",
]
