"""What leaves first: orders of chunks, what learns them, and what clients say of the future."""
