"""Measurements of decoding: run ``python benchmarks/decode.py``; README.md says what each one measures."""
