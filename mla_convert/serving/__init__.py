"""Serving converted models: with engines that are installed, and as a plugin of one."""
