"""Stage 7: win quality back by training the converted model against its source."""
