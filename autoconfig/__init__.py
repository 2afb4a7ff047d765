"""Auto-config: :mod:`.probe` a machine, :mod:`.measure` it, :mod:`.plan`, :mod:`.explain`."""
