"""What is compared, and what it takes to run a peer here."""
