"""Faster kernels for the operations that `@op` marks (ops.py): the same results, up to rounding.

The package works without this folder, and with SPECEXP_FAST=off, by the torch references alone."""
