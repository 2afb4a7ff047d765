"""Where every configuration key comes from: files, variables, flags, and what LMCache and LMI call
them."""
