"""Verification of exports: the engine loads what was written, and has to answer as the converted model does."""
