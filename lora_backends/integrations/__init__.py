"""Serving engines that this library runs inside of, unmodified."""
