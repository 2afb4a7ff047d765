"""Auto-config: probe the machine (:mod:`.probe`), measure it (:mod:`.measure`), decide
(:mod:`.plan`), and show why (:mod:`.explain`)."""
