"""Module path of kvtier in LMCache's configuration (:mod:`kvtier.extensions.lmcache_remote`)."""
