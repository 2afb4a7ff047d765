"""Base of all other rooms: chunks and their keys, errors, tenants, lanes, the pool of
slots, and secret files."""
