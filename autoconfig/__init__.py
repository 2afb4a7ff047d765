"""Auto-config: look (:mod:`.probe`), time (:mod:`.measure`), decide (:mod:`.plan`), show why
(:mod:`.explain`)."""
