"""Settings for the whole test process, made before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    # The kernels' own tests run on the CPU, interpreted. On a GPU the same tests run the compiled kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns that this setting's default is going to change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
