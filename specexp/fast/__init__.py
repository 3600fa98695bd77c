"""The same results, sooner. The algorithm runs without this folder, as with SPECEXP_FAST=off."""
