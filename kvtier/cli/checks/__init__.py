"""What ``kvtier doctor`` and ``kvtier serve`` try before they say that all is well."""
