"""What other requests feel while a long document is loaded."""
