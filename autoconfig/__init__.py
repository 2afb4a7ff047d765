"""Auto-config: :mod:`.probe` a machine, :mod:`.plan`, :mod:`.explain`, :mod:`.start`."""
