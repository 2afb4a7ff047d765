"""What is done with recorded requests: simulate and replay them."""
