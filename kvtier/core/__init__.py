"""What everything else rests on: chunks and their keys, errors, tenants, lanes, the pool of slots,
private files."""
