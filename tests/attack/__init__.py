"""What attackers do, one module for each door. Each attack is bounded in count and time, and cleans
up after itself, so that tests and a suite of attacks can use it beside an honest client."""
