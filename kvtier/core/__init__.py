"""What everything else is built on: chunks and their keys, errors, tenants, lanes, the pool of
slots, and secret files."""
