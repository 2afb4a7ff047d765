"""Module that ``module_path`` names in the extra configuration of SGLang's HiCache, and that
SGLang alone imports."""

from importlib import import_module

KVTier = import_module("kvtier.extensions.sglang.hicache").HiCachePages
