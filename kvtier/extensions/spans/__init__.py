"""Documents that are taken from the cache wherever they stand in a prompt. See README.md."""
