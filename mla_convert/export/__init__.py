"""Step 8: writing a converted model, and checking it by loading it again."""
