"""Arms of the comparison, and what peers need to run here."""
