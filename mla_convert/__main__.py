"""``python -m mla_convert``: the same as the ``mla-convert`` script."""

from mla_convert.cli import main

main()
