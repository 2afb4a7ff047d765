"""Base of all other rooms: chunks and keys, errors, tenants, lanes, slots, and secret files."""
