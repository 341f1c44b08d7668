"""The mathematics of the conversion: tensors in, tensors out, nothing mutated, float64 inside."""
