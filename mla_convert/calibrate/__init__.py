"""Calibration: text into token contexts, and a source's activations and gradients into moments."""
