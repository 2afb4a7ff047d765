"""Features that kvtier runs without, a folder each. Nothing below imports them. They are found by
name, where the configuration asks for one."""
