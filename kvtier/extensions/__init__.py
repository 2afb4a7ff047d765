"""What stands beside the core: each folder is one feature that kvtier runs without.

Nothing below imports them. They are found by name, where the configuration asks for one.
"""
