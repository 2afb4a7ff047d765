"""Where LMCache's configuration finds kvtier (:mod:`kvtier.extensions.lmcache_remote`)."""
