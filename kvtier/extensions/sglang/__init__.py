"""A kvtier server as the storage of SGLang's HiCache. Only SGLang loads ``hicache.py``."""
