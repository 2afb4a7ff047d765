"""Auto-config: :mod:`.facts`, :mod:`.plan`, :mod:`.explain`, :mod:`.start`."""
