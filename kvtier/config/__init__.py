"""Sources of configuration keys: files, variables, flags, and LMCache's and LMI's names."""
