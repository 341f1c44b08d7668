"""The targets of ``mla-convert export``: one file each, and one row each in ``registry``."""
