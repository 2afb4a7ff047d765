"""Where SGLang's configuration finds kvtier (:mod:`kvtier.extensions.sglang`)."""
