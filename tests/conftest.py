"""Settings for the whole test process, made before triton is imported."""

import os

# Tests multiply small matrices, in which threads cost more than they give. For this process and those it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # The kernels' own tests run on the CPU, interpreted. On a GPU the same tests run the compiled kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns that this setting's default is going to change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
